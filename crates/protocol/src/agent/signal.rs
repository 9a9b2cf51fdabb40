//! Signals by name and number, as Linux numbers them on x86-64 and arm64 (the two that gVisor runs on).

const NAMES: [&str; 31] = [
    "SIGHUP",
    "SIGINT",
    "SIGQUIT",
    "SIGILL",
    "SIGTRAP",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGKILL",
    "SIGUSR1",
    "SIGSEGV",
    "SIGUSR2",
    "SIGPIPE",
    "SIGALRM",
    "SIGTERM",
    "SIGSTKFLT",
    "SIGCHLD",
    "SIGCONT",
    "SIGSTOP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGXCPU",
    "SIGXFSZ",
    "SIGVTALRM",
    "SIGPROF",
    "SIGWINCH",
    "SIGIO",
    "SIGPWR",
    "SIGSYS",
];

/// The number of a signal by its name, with or without `SIG`.
#[must_use]
pub fn signal_number(name: &str) -> Option<i32> {
    let position = NAMES.iter().position(|known| *known == name || known[3..] == *name)?;
    i32::try_from(position + 1).ok()
}

/// The name of a signal; a real-time signal is named by its number.
#[must_use]
pub fn signal_name(number: i32) -> String {
    let named = usize::try_from(number).ok().and_then(|number| NAMES.get(number.checked_sub(1)?));
    named.map_or_else(|| format!("SIG{number}"), |name| (*name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_agree() {
        assert_eq!(signal_number("SIGKILL"), Some(9));
        assert_eq!(signal_number("TERM"), Some(15));
        assert_eq!(signal_number("SIGNOT"), None);
        assert_eq!(signal_name(2), "SIGINT");
        assert_eq!(signal_name(34), "SIG34");
        assert_eq!(signal_name(-1), "SIG-1");
    }
}
