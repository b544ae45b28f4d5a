#!/bin/sh
# Questions about one long document: the file is the document, each --prompt stands after it.
# Extra options go to the command, as in: examples/demo.sh --kv-budget 0.05
set -eu
document=$(dirname "$0")/harbour.txt

newline='
'

ask() {
    printf '\nQuestion: %s\nAnswer:' "$1"
}

exec herald generate --model tiny --prompt-file "$document" --max-tokens 32 --stop "$newline" \
    --prompt "$(ask 'What is the secret code of harbour?')" \
    --prompt "$(ask 'What is the phone number of Elsa Brandt?')" \
    --prompt "$(ask 'What is the access code of lighthouse?')" \
    "$@"
