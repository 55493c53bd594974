#!/bin/sh
# image.sh PROGRAM ARCHIVE NAME: a docker archive of an image that is one static program.
set -eu
program=$1
archive=$(realpath -m "$2")
name=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/root" "$work/image"
cp "$program" "$work/root/program"
tar -C "$work/root" --owner=0 --group=0 --mtime=@0 -cf "$work/image/layer.tar" program
layer=$(sha256sum "$work/image/layer.tar" | cut -d' ' -f1)
cat >"$work/image/config.json" <<END
{"architecture":"amd64","os":"linux","config":{"Entrypoint":["/program"],"User":"65532"},"rootfs":{"type":"layers","diff_ids":["sha256:$layer"]}}
END
echo "[{\"Config\":\"config.json\",\"RepoTags\":[\"$name\"],\"Layers\":[\"layer.tar\"]}]" >"$work/image/manifest.json"
tar -C "$work/image" -cf "$archive" manifest.json config.json layer.tar
