"""Chat formats: tokenizers, chat templates, tool-call syntaxes and grammars."""
