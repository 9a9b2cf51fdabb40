# Sourced by a bash that waits for its script, before it opens that. Only what is built in, and nothing that a script could notice.
# The word is an empty line, or the length of what is to be changed first and then that, as commands.
((BASH_VERSINFO[0] > 4 || (BASH_VERSINFO[0] == 4 && BASH_VERSINFO[1] >= 4))) || exit 3
# What is done for the first time is slow, and most programs print something.
read -r -t 0 || echo >/dev/null
read -r __sandboxer || exit 3
SECONDS=0
if [[ $__sandboxer ]]; then
	read -r -N "$__sandboxer" __sandboxer || exit 3
	eval "$__sandboxer"
fi
unset -v BASH_ENV __sandboxer
: bash
