//! What a checkpoint is bound to.

use std::fs;

use sandboxer_store::Host;

/// What made a checkpoint, and what a restore of it needs.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    pub runsc_version: String,
    pub platform: String,
    pub cpu_features: Vec<String>,
}

impl Facts {
    /// Of this machine.
    #[must_use]
    pub fn here(runsc_version: &str) -> Self {
        let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self { runsc_version: runsc_version.to_owned(), platform: "systrap".to_owned(), cpu_features: cpu_features(&cpu) }
    }

    pub(super) fn host(&self) -> Host<'_> {
        Host { runsc_version: &self.runsc_version, platform: &self.platform, cpu_features: &self.cpu_features }
    }
}

/// Those of the first CPU; all of a machine have the same.
fn cpu_features(cpuinfo: &str) -> Vec<String> {
    let line = cpuinfo.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        matches!(name.trim(), "flags" | "Features").then_some(value)
    });
    line.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_those_of_the_first_cpu() {
        let text = "processor\t: 0\nflags\t\t: fpu vme sse4_2\n\nprocessor\t: 1\nflags\t\t: fpu\n";
        assert_eq!(cpu_features(text), ["fpu", "vme", "sse4_2"]);
        assert_eq!(cpu_features("Features : fp asimd\n"), ["fp", "asimd"]);
        assert!(cpu_features("").is_empty());
    }
}
