#!/bin/bash
# Run once by the Postgres image, when its data folder is empty: etpi's role, which owns its database and nothing else.
set -euo pipefail
password="$(cat /run/secrets/etpi_password)"
psql --quiet --set ON_ERROR_STOP=1 --username "${POSTGRES_USER:-postgres}" --set password="$password" << 'END'
CREATE ROLE etpi LOGIN PASSWORD :'password';
CREATE DATABASE etpi OWNER etpi;
REVOKE ALL ON DATABASE etpi FROM PUBLIC;
END
