#!/bin/sh
# Does what the runsc beside it does, except for what files beside it ask for:
#   version             what it says of itself
#   restore.fail-N      a call in which it is given a path that can't be; the file is used up
#   pause.fail-N        a call that fails; likewise
#   resume.fail-N       the same
here=$(dirname "$0")
command=
for argument in "$@"; do
    case $argument in
    --version) if [ -e "$here/version" ]; then exec cat "$here/version"; fi ;;
    restore | pause | resume) command=$argument ;;
    esac
done
for plan in "$here/$command".fail-*; do
    if [ -n "$command" ] && rm "$plan" 2>/dev/null; then
        if [ "$command" != restore ]; then
            echo "not this time" >&2
            exit 1
        fi
        for argument in "$@"; do
            shift
            case $argument in -image-path=*) argument=-image-path=/dev/null/nothing ;; esac
            set -- "$@" "$argument"
        done
        break
    fi
done
exec "$here/real" "$@"
