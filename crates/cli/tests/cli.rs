//! The binary as a user sees it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use assert_cmd::Command;
use serde_json::Value;

fn sandboxer() -> Command {
    let mut command = Command::cargo_bin("sandboxer").unwrap();
    // Settings of whoever runs the tests are not theirs.
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SANDBOXER_")) {
        command.env_remove(name);
    }
    command
}

#[test]
fn a_wrong_command_line_exits_with_64_and_help_with_0() {
    for wrong in [vec![], vec!["nonsense"], vec!["image", "import", "x", "--name", ".hidden"], vec!["image", "rm", "a/b"]] {
        sandboxer().args(wrong).assert().code(64);
    }
    for right in [vec!["--help"], vec!["--version"], vec!["image", "build", "--help"], vec!["doctor", "--help"]] {
        sandboxer().args(right).assert().code(0);
    }
}

#[test]
fn an_empty_variable_counts_as_unset() {
    let help = sandboxer().args(["serve", "--help"]).assert().success();
    let help = String::from_utf8_lossy(&help.get_output().stdout).into_owned();
    let names: Vec<&str> = help.split("[env: ").skip(1).filter_map(|rest| rest.split('=').next()).collect();
    assert!(names.len() > 10 && names.contains(&"CHECKPOINT_AND_RESTORE_PATH"), "{names:?}");
    let directory = tempfile::tempdir().unwrap();
    let mut serve = sandboxer();
    serve.envs(names.iter().map(|name| (name, ""))).args(["serve", "--listen", "nonsense", "--data-dir"]).arg(directory.path());
    let output = serve.assert().code(64);
    let told = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(told.contains("--listen") && !names.iter().any(|name| told.contains(name)), "{told}");
}

#[test]
fn an_empty_image_directory_lists_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let output = sandboxer().args(["image", "ls", "--json", "--image-dir"]).arg(directory.path().join("new")).assert().success();
    let json: Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    assert_eq!(json, serde_json::json!({ "items": [] }));
}

#[test]
fn what_is_not_there_is_told_with_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let output = sandboxer().args(["image", "rm", "nothing", "--image-dir"]).arg(directory.path()).assert().code(1);
    let message = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(message.contains("no image nothing") && message.contains("sandboxer image ls"), "{message}");
}

#[test]
fn doctor_says_what_is_missing_and_exits_with_1() {
    let directory = tempfile::tempdir().unwrap();
    let mut doctor = sandboxer();
    doctor.args(["doctor", "--json", "--runsc", "/nowhere/runsc", "--image-dir"]).arg(directory.path().join("none"));
    let output = doctor.assert().code(1);
    let report: Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    assert_eq!(report["usable"], false);
    let runsc = &report["checks"][0];
    assert_eq!((runsc["status"].as_str(), runsc["required"].as_bool()), (Some("missing"), Some(true)));
    assert!(runsc["remedy"].as_str().unwrap().contains("scripts/setup"));
    assert!(!directory.path().join("none").exists(), "looking must not make anything");
}

#[test]
fn doctor_tries_how_much_can_be_saved_when_the_server_stops() {
    let directory = tempfile::tempdir().unwrap();
    for (volume, status, says) in
        [(directory.path().to_owned(), "ok", "MiB of changed memory"), (directory.path().join("none"), "missing", "can't be written")]
    {
        let mut doctor = sandboxer();
        doctor
            .args(["doctor", "--json", "--runsc", "/nowhere/runsc", "--stop-grace", "10", "--image-dir"])
            .arg(directory.path().join("images"));
        let output = doctor.arg("--checkpoint-path").arg(volume).assert().code(1);
        let report: Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
        let saving = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == "saving when the server stops").unwrap();
        assert!(saving["status"] == status && saving["detail"].as_str().unwrap().contains(says), "{saving}");
    }
}

#[test]
fn doctor_finds_the_sandboxes_of_this_machine_usable() {
    let Some(images) = std::env::var_os("SANDBOXER_IMAGE_DIR") else {
        eprintln!("not run: SANDBOXER_IMAGE_DIR is not set (make test sets it)");
        return;
    };
    let mut doctor = sandboxer();
    doctor.args(["doctor", "--image-dir"]).arg(images);
    if let Some(runsc) = std::env::var_os("SANDBOXER_RUNSC") {
        doctor.arg("--runsc").arg(runsc);
    }
    let output = doctor.assert().success();
    let text = String::from_utf8_lossy(&output.get_output().stdout).into_owned();
    assert!(text.contains("a sandbox (platform systrap): started in") && text.contains("Sandboxes can run here."), "{text}");
}
