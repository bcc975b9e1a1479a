"""A patch in the form of CooperBench's features."""

from __future__ import annotations

PATCH = """diff --git a/src/moor.py b/src/moor.py
index 1..2 100644
--- a/src/moor.py
+++ b/src/moor.py
@@ -1,3 +1,6 @@ class Boat:
     def within(self):
-        pass
+        return None
+    def tie_{n}(self, rope):
+        return rope
"""
