#!/bin/sh
# Write new passwords and Ray's token into deploy/secrets, in a folder of their owner alone. Nothing that exists is replaced.
#   sh deploy/secrets.sh [FOLDER] [HOST OF POSTGRES]
set -eu
umask 077
folder="${1:-$(dirname "$0")/secrets}"
host="${2:-postgres}"
mkdir -p "$folder"
for name in postgres_password etpi_password ray_token; do
  [ -e "$folder/$name" ] || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$folder/$name"
done
if [ ! -e "$folder/pgpass" ]; then
  echo "$host:5432:etpi:etpi:$(cat "$folder/etpi_password")" > "$folder/pgpass"
  chmod 644 "$folder/etpi_password"  # Postgres' user in its container reads it too; here the folder keeps others out
fi
# The containers' user reads the others; libpq refuses a password file that others can read.
if [ "$(id -u)" = 0 ]; then
  chown -R 1000:1000 "$folder"
elif [ "$(id -u)" != 1000 ]; then
  echo "give $folder to user 1000, as whom the containers run: sudo chown -R 1000:1000 $folder"
fi
