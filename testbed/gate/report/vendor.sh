#!/bin/sh
# Fetches the reports' charts (Plotly's basic bundle, MIT) from npm into vendor/, if it is the very package that is named here.
set -eu
VERSION=4.1.1
SHA256=ea907f854b6cec4f6a2fa71540ec019a21ed2c61e6a109ddd5c072103a96eed0
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm pack --silent "plotly.js-basic-dist-min@$VERSION" >/dev/null
echo "$SHA256  plotly.js-basic-dist-min-$VERSION.tgz" | sha256sum --check --quiet
tar xzf "plotly.js-basic-dist-min-$VERSION.tgz"
mkdir -p "$here/vendor"
cp package/plotly-basic.min.js "$here/vendor/"
cp package/LICENSE "$here/vendor/plotly.LICENSE"
