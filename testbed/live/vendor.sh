#!/bin/sh
# Fetches the charts' library (uPlot, MIT) from npm into assets/vendor, if it is the very package that is named here.
set -eu
VERSION=1.6.32
SHA256=4b8a8191e425658e3ea8c8c1314b0fc679c861ee3a1af2b20c7b16ba50b5133d
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm pack --silent "uplot@$VERSION" >/dev/null
echo "$SHA256  uplot-$VERSION.tgz" | sha256sum --check --quiet
tar xzf "uplot-$VERSION.tgz"
mkdir -p "$here/assets/vendor"
cp package/dist/uPlot.iife.min.js package/dist/uPlot.min.css "$here/assets/vendor/"
cp package/LICENSE "$here/assets/vendor/uPlot.LICENSE"
