//! What is run, the same in every column.

use sandboxer_protocol::agent::Language;

/// Bytes of one line of the text that the throughput programs print, its newline among them.
const LINE_BYTES: usize = 64;
const MIB: usize = 1024 * 1024;

/// A program, with the same meaning whether it is a script or an argument of its interpreter.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) language: Language,
    pub(crate) code: String,
    /// The bytes of standard output that it must come to.
    pub(crate) output_bytes: u64,
}

impl Program {
    fn new(language: Language, code: impl Into<String>, output_bytes: u64) -> Self {
        Self { language, code: code.into(), output_bytes }
    }

    /// As its interpreter is called with the code as an argument.
    pub(crate) fn argv(&self) -> [&str; 3] {
        match self.language {
            Language::Bash => ["bash", "-c", &self.code],
            Language::Python => ["python3", "-c", &self.code],
        }
    }

    /// As a client of the server names its language.
    pub(crate) fn language_name(&self) -> &'static str {
        match self.language {
            Language::Bash => "bash",
            Language::Python => "python",
        }
    }
}

pub(crate) fn echo() -> Program {
    Program::new(Language::Bash, "echo hi", 3)
}

pub(crate) fn print() -> Program {
    Program::new(Language::Python, "print('hi')", 3)
}

/// The four that scripts of this kind begin with; two of them are large.
pub(crate) const FOUR_IMPORTS: &str = "json, re, subprocess, asyncio";

pub(crate) fn imports() -> Program {
    Program::new(Language::Python, format!("import {FOUR_IMPORTS}\nprint('hi')"), 3)
}

/// Prints lines of printable text by writes of `write_bytes` each, nothing else in the way.
pub(crate) fn stdout(mib: usize, write_bytes: usize) -> Program {
    let line = "the quick brown fox jumps over the lazy dog, and 0123456789 too";
    debug_assert_eq!(line.len() + 1, LINE_BYTES);
    let (lines, writes) = (write_bytes / LINE_BYTES, mib * MIB / write_bytes);
    // A write to a pipe of the host, as `runsc exec` gives it one, may take only a part.
    let code = format!(
        "import os\npiece = memoryview(b'{line}\\n' * {lines})\nfor _ in range({writes}):\n    rest = piece\n    while rest:\n        rest = rest[os.write(1, rest):]\n"
    );
    Program::new(Language::Python, code, (writes * lines * LINE_BYTES) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_throughput_programs_print_what_they_promise() {
        let line = "the quick brown fox jumps over the lazy dog, and 0123456789 too";
        assert_eq!(line.len() + 1, LINE_BYTES);
        assert_eq!(stdout(64, 64 * 1024).output_bytes, 64 * MIB as u64);
        assert_eq!(stdout(1, 4 * 1024).output_bytes, MIB as u64);
    }
}
