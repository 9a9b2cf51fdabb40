//! What a repository may ask of the host that its containers run on. It is judged on the configuration as compose itself has resolved it,
//! and by a list of what is known to be harmless: what is not on it is refused by name.
//!
//! A container must get nothing of the host but files of its own sandbox's directory. `trust_repos` in the hosts file turns this off.

use std::path::{Component, Path, PathBuf};

use serde_json::{Map, Value};

use crate::{ExtensionError, Kind};

const TOP: &[&str] = &["name", "services", "networks", "volumes"];
const SERVICE: &[&str] = &[
    "annotations",
    "attach",
    "build",
    "cap_drop",
    "command",
    "cpu_count",
    "cpu_percent",
    "cpu_shares",
    "cpus",
    "depends_on",
    "deploy",
    "dns",
    "dns_search",
    "entrypoint",
    "environment",
    "expose",
    "extra_hosts",
    "healthcheck",
    "hostname",
    "image",
    "init",
    "labels",
    "mem_limit",
    "mem_reservation",
    "memswap_limit",
    "network_mode",
    "networks",
    "pids_limit",
    "platform",
    "ports",
    "profiles",
    "pull_policy",
    "read_only",
    "restart",
    "scale",
    "security_opt",
    "shm_size",
    "stdin_open",
    "stop_grace_period",
    "stop_signal",
    "tmpfs",
    "tty",
    "ulimits",
    "user",
    "volumes",
    "working_dir",
];
const BUILD: &[&str] = &["args", "context", "dockerfile", "dockerfile_inline", "labels", "target"];
const DEPLOY: &[&str] = &["placement", "replicas", "resources", "restart_policy"];
const NETWORK: &[&str] = &["driver", "internal", "ipam", "labels", "name"];
const VOLUME: &[&str] = &["driver", "labels", "name"];

pub(super) fn refuse(why: &str) -> ExtensionError {
    let message =
        format!("The repository asks for what a sandbox may not have: {why}. A host with trust_repos in the hosts file would allow it.");
    ExtensionError::new(Kind::Invalid, "repo_refused", message)
}

type Checked = Result<(), ExtensionError>;

fn only(what: &str, fields: &Map<String, Value>, allowed: &[&str]) -> Checked {
    // Empty ones ask for nothing; compose writes some of them.
    let empty = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    };
    match fields.iter().find(|(name, value)| !allowed.contains(&name.as_str()) && !name.starts_with("x-") && !empty(value)) {
        None => Ok(()),
        Some((name, _)) => Err(refuse(&format!("{what}.{name}"))),
    }
}

fn object<'a>(what: &str, value: &'a Value) -> Result<&'a Map<String, Value>, ExtensionError> {
    value.as_object().ok_or_else(|| refuse(&format!("{what} is not understood")))
}

fn entries<'a>(fields: &'a Map<String, Value>, name: &str) -> Result<Vec<(&'a String, &'a Value)>, ExtensionError> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(value) => Ok(object(name, value)?.iter().collect()),
    }
}

/// A directory of the host that a container gets.
struct Bind {
    source: PathBuf,
    writable: bool,
}

/// Checks a resolved configuration. Returns the paths on the host that it uses, which must not be links.
pub(super) fn check(resolved: &[u8], dir: &Path, project: &str) -> Result<Vec<String>, ExtensionError> {
    let resolved: Value =
        serde_json::from_slice(resolved).map_err(|error| refuse(&format!("its configuration can't be read ({error})")))?;
    let top = object("the configuration", &resolved)?;
    only("the compose file", top, TOP)?;
    for (name, network) in entries(top, "networks")? {
        own(&format!("networks.{name}"), network, NETWORK, "bridge", project)?;
    }
    for (name, volume) in entries(top, "volumes")? {
        own(&format!("volumes.{name}"), volume, VOLUME, "local", project)?;
    }
    let mut binds = Vec::new();
    let mut paths = Vec::new();
    for (name, value) in entries(top, "services")? {
        let what = format!("services.{name}");
        service(&what, object(&what, value)?, dir, &mut binds, &mut paths)?;
    }
    // A container that can write to a directory can put a link in it, which leads elsewhere once another is started anew.
    for inner in &binds {
        if binds.iter().any(|outer| outer.writable && inner.source != outer.source && inner.source.starts_with(&outer.source)) {
            return Err(refuse(&format!(
                "{} is given to a container and lies within a directory that another can write to",
                inner.source.display()
            )));
        }
    }
    paths.extend(binds.into_iter().map(|bind| bind.source));
    let text = |path: PathBuf| path.to_str().map(str::to_owned).ok_or_else(|| refuse("a path that is not text"));
    paths.into_iter().map(text).collect()
}

/// A network or volume of the project's own.
fn own(what: &str, value: &Value, allowed: &[&str], driver: &str, project: &str) -> Checked {
    if value.is_null() {
        return Ok(());
    }
    let fields = object(what, value)?;
    only(what, fields, allowed)?;
    if fields.get("driver").is_some_and(|value| *value != driver) {
        return Err(refuse(&format!("{what}.driver")));
    }
    match fields.get("name").map(|name| name.as_str().is_some_and(|name| name.starts_with(&format!("{project}_")))) {
        None | Some(true) => Ok(()),
        Some(false) => Err(refuse(&format!("{what}.name: it must be the project's own"))),
    }
}

fn service(what: &str, fields: &Map<String, Value>, dir: &Path, binds: &mut Vec<Bind>, paths: &mut Vec<PathBuf>) -> Checked {
    only(what, fields, SERVICE)?;
    if let Some(mode) = fields.get("network_mode")
        && !mode.as_str().is_some_and(|mode| mode == "none" || mode == "bridge" || mode.starts_with("service:"))
    {
        return Err(refuse(&format!("{what}.network_mode")));
    }
    if let Some(Value::Array(options)) = fields.get("security_opt")
        && options.iter().any(|option| !matches!(option.as_str(), Some("no-new-privileges" | "no-new-privileges:true")))
    {
        return Err(refuse(&format!("{what}.security_opt")));
    }
    if let Some(deploy) = fields.get("deploy").filter(|deploy| !deploy.is_null()) {
        let deploy = object(&format!("{what}.deploy"), deploy)?;
        only(&format!("{what}.deploy"), deploy, DEPLOY)?;
        if let Some(Value::Object(resources)) = deploy.get("resources") {
            only(&format!("{what}.deploy.resources"), resources, &["limits"])?;
        }
    }
    match fields.get("build") {
        None | Some(Value::Null) => {}
        Some(build) => paths.push(self::build(what, build, dir)?),
    }
    for volume in fields.get("volumes").and_then(Value::as_array).into_iter().flatten() {
        let volume = object(&format!("{what}.volumes"), volume)?;
        match volume.get("type").and_then(Value::as_str) {
            Some("volume" | "tmpfs") => {}
            Some("bind") => {
                let source = volume.get("source").and_then(Value::as_str).unwrap_or_default();
                let source =
                    within(source, dir).ok_or_else(|| refuse(&format!("{what}.volumes: {source:?} is not of its own directory")))?;
                let bind = volume.get("bind").and_then(Value::as_object);
                if bind.is_some_and(|bind| bind.keys().any(|key| key != "create_host_path" && key != "selinux")) {
                    return Err(refuse(&format!("{what}.volumes: options of a bind mount")));
                }
                binds.push(Bind { source, writable: volume.get("read_only") != Some(&Value::Bool(true)) });
            }
            _ => return Err(refuse(&format!("{what}.volumes: a kind of volume that is not known"))),
        }
    }
    Ok(())
}

fn build(what: &str, build: &Value, dir: &Path) -> Result<PathBuf, ExtensionError> {
    let what = format!("{what}.build");
    let build = object(&what, build)?;
    only(&what, build, BUILD)?;
    let context = build.get("context").and_then(Value::as_str).unwrap_or_default();
    let context = within(context, dir).ok_or_else(|| refuse(&format!("{what}.context: {context:?} is not of its own directory")))?;
    match build.get("dockerfile").map(Value::as_str) {
        None => {}
        Some(Some(file)) if within(&context.join(file).to_string_lossy(), &context).is_some() => {}
        Some(_) => return Err(refuse(&format!("{what}.dockerfile: it is not of its own directory"))),
    }
    Ok(context)
}

/// The path, if it is spelt as one below the directory.
fn within(path: &str, dir: &Path) -> Option<PathBuf> {
    let path = PathBuf::from(path);
    let plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    (path.is_absolute() && plain && path.starts_with(dir)).then(|| path.components().collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const DIR: &str = "/srv/s/1";

    fn checked(service: Value) -> Result<Vec<String>, ExtensionError> {
        whole(json!({ "name": "sbx-1", "services": { "a": service } }))
    }

    fn whole(config: Value) -> Result<Vec<String>, ExtensionError> {
        check(config.to_string().as_bytes(), Path::new(DIR), "sbx-1")
    }

    #[test]
    fn what_stays_within_the_sandbox_is_allowed() {
        let bind = json!({ "type": "bind", "source": "/srv/s/1/data", "target": "/data", "bind": { "create_host_path": true } });
        let service = json!({
            "image": "x", "command": ["a"], "entrypoint": null, "environment": { "A": "b" }, "privileged_": null, "configs": [],
            "ports": [{ "target": 80 }], "volumes": [bind, { "type": "volume", "source": "v", "target": "/v" }], "x-note": 1,
            "build": { "context": "/srv/s/1/app", "dockerfile": "Dockerfile" }, "security_opt": ["no-new-privileges:true"],
        });
        let config = json!({
            "name": "sbx-1", "services": { "a": service },
            "networks": { "default": { "name": "sbx-1_default", "ipam": {} } }, "volumes": { "v": { "name": "sbx-1_v" } },
        });
        assert_eq!(whole(config).unwrap(), ["/srv/s/1/app", "/srv/s/1/data"]);
    }

    #[test]
    fn what_reaches_the_host_is_refused_by_name() {
        let bind = |source: &str| json!({ "volumes": [{ "type": "bind", "source": source, "target": "/x" }] });
        for (bad, name) in [
            (json!({ "privileged": true }), "privileged"),
            (json!({ "cap_add": ["SYS_ADMIN"] }), "cap_add"),
            (json!({ "devices": ["/dev/sda"] }), "devices"),
            (json!({ "pid": "host" }), "pid"),
            (json!({ "ipc": "host" }), "ipc"),
            (json!({ "userns_mode": "host" }), "userns_mode"),
            (json!({ "network_mode": "host" }), "network_mode"),
            (json!({ "network_mode": "container:other" }), "network_mode"),
            (json!({ "env_file": [{ "path": "/etc/shadow" }] }), "env_file"),
            (json!({ "secrets": ["x"] }), "secrets"),
            (json!({ "provider": { "type": "x" } }), "provider"),
            (json!({ "post_start": [{ "command": "x", "privileged": true }] }), "post_start"),
            (json!({ "container_name": "other" }), "container_name"),
            (json!({ "volumes_from": ["container:x"] }), "volumes_from"),
            (json!({ "security_opt": ["seccomp:unconfined"] }), "security_opt"),
            (json!({ "runtime": "x" }), "runtime"),
            (json!({ "logging": { "driver": "x" } }), "logging"),
            (json!({ "deploy": { "resources": { "reservations": { "devices": [1] } } } }), "reservations"),
            (bind("/"), "directory"),
            (bind("/var/run/docker.sock"), "directory"),
            (bind("/srv/s/1/../2"), "directory"),
            (bind("/srv/s/12"), "directory"),
            (bind("data"), "directory"),
            (json!({ "volumes": [{ "type": "npipe" }] }), "kind"),
            (json!({ "volumes": [{ "type": "bind", "source": "/srv/s/1", "bind": { "propagation": "shared" } }] }), "options"),
            (json!({ "build": { "context": "/etc" } }), "context"),
            (json!({ "build": { "context": "/srv/s/1", "dockerfile": "/etc/passwd" } }), "dockerfile"),
            (json!({ "build": { "context": "/srv/s/1", "network": "host" } }), "network"),
            (json!({ "build": "/etc" }), "build"),
        ] {
            let error = checked(bad.clone()).unwrap_err();
            assert!(error.message.contains(name) && error.kind == Kind::Invalid, "{bad}: {error}");
        }
        for bad in [
            json!({ "volumes": { "v": { "name": "sbx-1_v", "driver_opts": { "type": "none", "o": "bind", "device": "/" } } } }),
            json!({ "volumes": { "v": { "name": "other_v" } } }),
            json!({ "volumes": { "v": { "name": "other_v", "external": true } } }),
            json!({ "networks": { "n": { "name": "other", "external": true } } }),
            json!({ "networks": { "n": { "name": "sbx-1_n", "driver": "host" } } }),
            json!({ "configs": { "c": { "file": "/etc/shadow" } } }),
            json!({ "secrets": { "c": { "file": "/etc/shadow" } } }),
            json!({ "services": [] }),
            json!([]),
        ] {
            assert!(whole(bad.clone()).is_err(), "{bad}");
        }
        assert!(check(b"nonsense", Path::new(DIR), "sbx-1").is_err());
    }

    #[test]
    fn a_directory_within_a_writable_one_is_refused() {
        let bind = |source: &str, read_only: bool| json!({ "type": "bind", "source": source, "target": "/x", "read_only": read_only });
        assert!(checked(json!({ "volumes": [bind(DIR, false), bind("/srv/s/1/sub", false)] })).is_err());
        assert!(checked(json!({ "volumes": [bind(DIR, true), bind("/srv/s/1/sub", false)] })).is_ok());
        assert!(checked(json!({ "volumes": [bind(DIR, false), bind(DIR, false)] })).is_ok());
    }
}
