# Sourced by a bash that waits for its script, before it opens that. Only what is built in, and nothing that a script could notice.
((BASH_VERSINFO[0] > 4 || (BASH_VERSINFO[0] == 4 && BASH_VERSINFO[1] >= 4))) || exit 3
read -r -u 3 __sandboxer || exit 3
mapfile -d '' -t -u 4 __sandboxer
exec 3<&- 4<&-
builtin cd -P -- "${__sandboxer[0]}" || exit 126
[[ ${__sandboxer[1]} == 1 ]] || exec </dev/null
RANDOM=${__sandboxer[2]} SECONDS=0
unset -v BASH_ENV OLDPWD
export OLDPWD
for __sandboxer in "${__sandboxer[@]:3}"; do
	case $__sandboxer in
		+*) export "${__sandboxer:1}" ;;
		-*) unset -v "${__sandboxer:1}" ;;
	esac
done
unset -v __sandboxer
: bash
