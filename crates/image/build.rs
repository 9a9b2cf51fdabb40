//! Builds the agent as a static binary, to be embedded: the images that this crate makes carry it, so the `sandboxer` binary is all that has to be
//! installed. `SANDBOXER_AGENT_BINARY=/path` at build time embeds that file instead.

use std::env;
use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What cargo or clippy tells the crates of the outer build and must not reach the inner one.
const NOT_INHERITED: [&str; 9] = [
    "RUSTFLAGS",
    "RUSTC_WORKSPACE_WRAPPER",
    "CLIPPY_ARGS",
    "CARGO_BUILD_TARGET",
    "CARGO_BUILD_RUSTFLAGS",
    "CARGO_TARGET_DIR",
    "CARGO_BUILD_TARGET_DIR",
    "CARGO_PROFILE_RELEASE_DEBUG",
    "CARGO_LLVM_COV",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed=SANDBOXER_AGENT_BINARY");
    let out = PathBuf::from(variable("OUT_DIR")?);
    let embedded = out.join("sandboxer-agent");
    let built = match env::var_os("SANDBOXER_AGENT_BINARY").filter(|path| !path.is_empty()) {
        Some(given) => {
            let given = PathBuf::from(given);
            println!("cargo::rerun-if-changed={}", given.display());
            given
        }
        None => build_agent(&out)?,
    };
    fs::copy(&built, &embedded).map_err(|error| format!("the agent binary {}: {error}", built.display()))?;
    println!("cargo::rustc-env=SANDBOXER_EMBEDDED_AGENT={}", embedded.display());
    Ok(())
}

fn build_agent(out: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let manifest_dir = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let workspace = manifest_dir.join("../..").canonicalize()?;
    for watched in ["crates/agent", "crates/layer", "crates/protocol", "Cargo.lock", "Cargo.toml"] {
        println!("cargo::rerun-if-changed={}", workspace.join(watched).display());
    }
    let target = variable("TARGET")?.into_string().map_err(|_| "TARGET is not UTF-8")?;
    let target_dir = out.join("agent-target");

    let mut cargo = Command::new(variable("CARGO")?);
    for name in NOT_INHERITED {
        cargo.env_remove(name);
    }
    // Static, so that it runs in any image; and without this machine's paths in it, so that the same sources give the same image.
    let mut flags = OsString::from("-Ctarget-feature=+crt-static");
    for (prefix, name) in [(Some(workspace.clone().into_os_string()), "/src"), (env::var_os("CARGO_HOME"), "/cargo")] {
        if let Some(prefix) = prefix {
            flags.push("\u{1f}--remap-path-prefix=");
            flags.push(prefix);
            flags.push("=");
            flags.push(name);
        }
    }
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags);
    let status = cargo
        .current_dir(&workspace)
        .args(["build", "--package", "sandboxer-agent", "--bin", "sandboxer-agent", "--profile", "agent", "--target", &target])
        .arg("--target-dir")
        .arg(&target_dir)
        .status()?;
    if !status.success() {
        return Err(format!(
            "building sandboxer-agent failed ({status}); its messages are above. To embed a ready one: SANDBOXER_AGENT_BINARY=/path"
        )
        .into());
    }
    Ok(target_dir.join(target).join("agent").join("sandboxer-agent"))
}

fn variable(name: &str) -> Result<OsString, String> {
    env::var_os(name).ok_or_else(|| format!("{name} is not set: this build script is run by cargo"))
}
