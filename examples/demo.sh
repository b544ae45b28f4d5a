#!/bin/sh
# Questions about one long document: the file is the document, each --prompt stands after it. One request at
# a time, so that the statistics are each answer's own; the last answer takes eight blocks.
# Extra options go to the command, as in: examples/demo.sh --kv-budget 0.05
set -eu
document=$(dirname "$0")/harbour.txt

newline='
'

ask() {
    printf '\nQuestion: %s\nAnswer:' "$1"
}

exec herald generate --model tiny --prompt-file "$document" --max-tokens 160 --stop "$newline" --max-num-seqs 1 \
    --prompt "$(ask 'What is the secret code of harbour?')" \
    --prompt "$(ask 'What are the phone number of Elsa Brandt and the order number of new crane?')" \
    --prompt "$(ask 'Quote the sentence that begins with "Six steps had worn".')" \
    "$@"
