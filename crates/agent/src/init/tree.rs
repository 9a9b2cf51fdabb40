//! Killing all that descends from a process, where this gVisor has no cgroups. Children may be born while we look, so we look
//! until nothing is left; what has left its parent, its session and its process group is not found.

use std::{collections::HashSet, fs};

use crate::sys;

/// Rounds after which we give up: each finds what the one before missed.
const MAX_ROUNDS: usize = 50;

pub(super) fn kill(root: i32) {
    let mut found = HashSet::from([root]);
    for _ in 0..MAX_ROUNDS {
        let processes = processes();
        let mut grown = true;
        while grown {
            grown = false;
            for process in &processes {
                let related = [process.parent, process.group, process.session].iter().any(|pid| found.contains(pid));
                if related && process.pid != 1 {
                    grown |= found.insert(process.pid);
                }
            }
        }
        let alive: Vec<_> = processes.iter().filter(|process| found.contains(&process.pid) && !process.dead).collect();
        if alive.is_empty() {
            return;
        }
        for process in alive {
            let _ = sys::kill(process.pid, libc::SIGKILL);
        }
    }
}

struct Process {
    pid: i32,
    parent: i32,
    group: i32,
    session: i32,
    dead: bool,
}

fn processes() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| parse(&fs::read_to_string(entry.path().join("stat")).ok()?)).collect()
}

fn parse(stat: &str) -> Option<Process> {
    let pid = stat.split(' ').next()?.parse().ok()?;
    // The name is in parentheses and may hold anything, spaces and parentheses included.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let dead = matches!(fields.next()?, "Z" | "X");
    let mut number = || fields.next()?.parse().ok();
    Some(Process { pid, parent: number()?, group: number()?, session: number()?, dead })
}
