#!/bin/sh
# take-symfony.sh DIR: PHP and Symfony Messenger with its SQS transport, out of Debian's packages; DIR/php runs them.
# Strategy: they are unpacked into DIR with all that they depend on, and not installed, so nothing of the machine's own
# is touched or used. Where there is no apt, DIR stays empty, and the test of Symfony is skipped with that reason.
set -eu

directory=$1
rm -rf "$directory"
mkdir -p "$directory/packages/partial"
cd "$directory"
command -v apt-get >/dev/null 2>&1 || {
    echo "veilmq: this machine has no apt-get: the test of Symfony is skipped" >&2
    exit 0
}

download() {
    apt-get -qq install --yes --download-only --no-install-recommends -o Debug::NoLocking=1 \
        -o Dir::State::status=/dev/null -o Dir::Cache::archives="$PWD/packages" \
        php-cli php-curl php-xml php-symfony-amazon-sqs-messenger php-symfony-http-client
}

echo "veilmq: unpacking Symfony into $directory" >&2
if ! { download || { apt-get -qq update && download; }; } >log 2>&1; then
    cat log >&2
    echo "veilmq: apt-get could not download Symfony; try again, or see tools/take-symfony.sh for what it needs" >&2
    exit 1
fi
for package in packages/*.deb; do
    dpkg-deb --extract "$package" .
done
rm -r packages log
# Debian 13's files load each other by the path at which they would be installed.
grep -rlF --include=autoload.php "'/usr/share/php/" usr/share/php | xargs -r sed -i "s#'/usr/share/php/#'$PWD/usr/share/php/#"
loader=$(find . -name 'ld-linux-*.so.*' -type f | head -n 1)
program=$(find . -path './usr/bin/php[1-9]*' -type f | head -n 1)
extensions=$(find . -path './usr/lib/php/*/posix.so')
cat >php <<END
#!/bin/sh
here=\${0%/*}
libraries=\$(echo "\$here"/lib/*-linux-gnu "\$here"/usr/lib/*-linux-gnu | tr ' ' ':')
exec "\$here/$loader" --library-path "\$libraries" "\$here/$program" -n -d include_path="\$here/usr/share/php" \\
    -d extension_dir="\$here/${extensions%/*}" -d extension=curl -d extension=posix -d extension=simplexml "\$@"
END
chmod +x php
