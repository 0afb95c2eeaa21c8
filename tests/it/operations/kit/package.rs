//! The Debian package: its files exist, its first configuration starts, and it leaves nothing behind.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use fairlane::config::Config;

use super::service::setting;
use super::{root, text};
use crate::support::receivers::is_there;
use crate::support::served::PROGRAM;

const CONFIGURATION: &str = "deploy/debian/fairlane.toml";
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];
/// What `make deb` builds.
const BUILT: &str = "target/release/";
/// What the test of the installation needs, where the copy of the system finds it.
const TOOLS: [&str; 8] = [
    "/usr/bin/apt-get",
    "/usr/bin/dpkg",
    "/usr/bin/dpkg-deb",
    "/usr/bin/deb-systemd-helper",
    "/usr/bin/systemd-sysusers",
    "/usr/bin/redis-server",
    "/usr/bin/curl",
    "/usr/bin/unshare",
];

/// A copy of the system has its own mounts, network, processes and control groups.
const APART: [&str; 8] =
    ["--mount", "--net", "--pid", "--fork", "--kill-child", "--cgroup", "--ipc", "--uts"];
/// What the copy is made with.
const COPY: &str = r#"
mount -t tmpfs tmpfs "$1"
mkdir "$1/changes" "$1/work" "$1/root" "$1/cgroup"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/changes,workdir=$1/work" "$1/root"
mount -t cgroup2 cgroup2 "$1/cgroup"
"#;

/// A file of the package.
struct Asset {
    source: String,
    /// A directory, if it ends with a slash.
    target: String,
    mode: u32,
}

impl Asset {
    /// The path in the package of this file, which is one of its sources.
    fn place(&self, file: &Path) -> PathBuf {
        let target = Path::new(&self.target);
        if self.target.ends_with('/') {
            target.join(file.file_name().expect("a name"))
        } else {
            target.to_owned()
        }
    }
}

fn metadata() -> toml::Table {
    let manifest: toml::Table = text("Cargo.toml").parse().expect("TOML");
    manifest["package"]["metadata"]["deb"].as_table().expect("a table").clone()
}

fn list(metadata: &toml::Table, key: &str) -> Vec<String> {
    let values = metadata[key].as_array().unwrap_or_else(|| panic!("{key}: a list"));
    values.iter().map(|value| value.as_str().expect("a text").to_owned()).collect()
}

fn assets() -> Vec<Asset> {
    let metadata = metadata();
    let assets = metadata["assets"].as_array().expect("a list").iter();
    let read = |asset: &toml::Value| {
        let fields: Vec<&str> =
            asset.as_array().expect("a list").iter().map(|f| f.as_str().expect("a text")).collect();
        let [source, target, mode] = fields[..] else { panic!("{asset}: source, target, mode") };
        Asset {
            source: source.to_owned(),
            target: target.to_owned(),
            mode: u32::from_str_radix(mode, 8).expect("a mode"),
        }
    };
    assets.map(read).collect()
}

/// The files with this path, whose name may have one `*`.
fn matching(path: &Path) -> Vec<PathBuf> {
    let name = path.file_name().expect("a name").to_string_lossy();
    let Some((before, after)) = name.split_once('*') else { return vec![path.to_owned()] };
    let found = fs::read_dir(path.parent().expect("a directory")).expect("a directory");
    let found = found.map(|entry| entry.expect("a file").path()).filter(|path| {
        let name = path.file_name().expect("a name").to_string_lossy();
        name.len() > before.len() + after.len() && name.starts_with(before) && name.ends_with(after)
    });
    found.collect()
}

fn first_configuration() -> Config {
    Config::from_toml(&text(CONFIGURATION), CONFIGURATION).expect("it is accepted")
}

#[test]
fn every_file_of_the_package_exists_or_is_made_by_make() {
    let makefile = text("Makefile");
    for Asset { source, .. } in assets() {
        match source.strip_prefix(BUILT) {
            None => {
                let found = matching(&root().join(&source));
                assert!(!found.is_empty() && found.iter().all(|file| file.exists()), "{source}");
            }
            Some("fairlane") => {}
            Some(made) => {
                let part = made.strip_prefix("package/").expect("made by `make deb`");
                let part = part.split('/').next().expect("a directory");
                assert!(makefile.contains(&format!("$(PACKAGE)/{part}")), "{source} is not made");
            }
        }
    }
    for shell in ["bash", "zsh", "fish"] {
        let source = format!("{BUILT}package/completions/fairlane.{shell}");
        assert!(assets().iter().any(|asset| asset.source == source), "{source} is not packed");
    }
}

#[test]
fn the_package_has_the_buses_that_the_image_has() {
    let features = list(&metadata(), "features").join(",");
    assert!(
        text("Makefile")
            .contains(&format!("cargo build --release --locked --features {features}\n"))
    );
    assert!(text("Dockerfile").contains(&format!("--features {features} ")));
}

#[test]
fn an_upgrade_keeps_the_changes_of_every_file_in_etc() {
    let kept: BTreeSet<String> = list(&metadata(), "conf-files").into_iter().collect();
    let packed = assets();
    let packed = packed.iter().filter(|asset| asset.target.starts_with("etc/"));
    let packed: BTreeSet<String> = packed
        .map(|asset| format!("/{}", asset.place(Path::new(&asset.source)).display()))
        .collect();
    assert_eq!(kept, packed);
    assert!(kept.contains("/etc/fairlane/fairlane.toml"));
}

#[test]
fn the_first_configuration_starts_on_the_loopback_with_a_private_redis() {
    let config = first_configuration();
    assert!(config.redis.url.is_none());
    assert_eq!(config.data_dir, Path::new(&setting("WorkingDirectory")));
    assert!(config.http.listen.ip().is_loopback() && config.metrics.listen.ip().is_loopback());
    assert_eq!(config.pipelines.iter().filter(|(name, _)| name.as_str() == "log").count(), 1);
    let start = setting("ExecStart");
    assert!(start.ends_with(" --config /etc/fairlane/fairlane.toml"), "{start}");
}

#[test]
fn the_advice_of_the_first_configuration_on_tokens_can_be_followed() {
    let text = text(CONFIGURATION);
    let examples = text.lines().filter_map(|line| line.strip_prefix("#   "));
    let advice: Vec<&str> = examples.filter(|line| !line.contains("sudo")).collect();
    let followed = format!("{text}\n{}", advice.join("\n"));
    let config = Config::from_toml(&followed, CONFIGURATION).expect("it is accepted");
    let token = &config.auth.tokens[0];
    let file = token.token_file.to_str().expect("a path");
    assert_eq!(file, format!("/run/credentials/fairlane.service/token_{}", token.name));
}

#[test]
fn the_scripts_make_and_delete_what_the_service_uses() {
    let script = |name: &str| text(&format!("deploy/debian/scripts/{name}"));
    for name in SCRIPTS {
        let script = script(name);
        assert!(script.starts_with("#!/bin/sh\n") && script.contains("\nset -e\n"), "{name}");
        let path = root().join("deploy/debian/scripts").join(name);
        let parsed = Command::new("sh").arg("-n").arg(&path).status().expect("a shell");
        assert!(parsed.success(), "{name}");
        let mode = fs::metadata(&path).expect("a file").permissions().mode();
        assert_eq!(mode & 0o111, 0o111, "{name} cannot be run");
    }
    let user = setting("User");
    let home = setting("WorkingDirectory");
    let sysusers = text("deploy/debian/sysusers.conf");
    assert!(sysusers.contains(&format!("\nu {user} - \"Fairlane\" {home}\n")), "{sysusers}");
    // Debian 12 has no /etc/sysusers.d.
    let installed = "install -D -m 644 deploy/debian/sysusers.conf /etc/sysusers.d/";
    assert!(text("docs/install.md").contains(installed), "{installed}");
    for place in ["/etc/fairlane/tokens", "/etc/fairlane/secrets", &home] {
        assert!(script("postinst").contains(place), "{place} is not made");
    }
    assert!(script("postrm").contains(&format!("rm -rf {home} /etc/fairlane\n")));
}

/// Makes the package of the files that `cargo deb` packs, with the program of this build.
fn build(directory: &Path) -> PathBuf {
    let run = |command: &mut Command| {
        let output = command.output().expect("a program");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    // The program and what it makes, under the names that the assets have.
    let built = directory.join("built");
    let (completions, man) = (built.join("package/completions"), built.join("package/man"));
    fs::create_dir_all(&completions).expect("a directory");
    symlink(PROGRAM, built.join("fairlane")).expect("a link");
    for shell in ["bash", "zsh", "fish"] {
        let script = run(Command::new(PROGRAM).args(["completions", shell]));
        fs::write(completions.join(format!("fairlane.{shell}")), script).expect("a file");
    }
    run(Command::new(PROGRAM).args(["man", "--dir"]).arg(&man));
    // As `make deb` does.
    run(Command::new("gzip").arg("-9nr").arg(&man));

    let tree = directory.join("tree");
    for asset in assets() {
        let source = match asset.source.strip_prefix(BUILT) {
            Some(made) => built.join(made),
            None => root().join(&asset.source),
        };
        for source in matching(&source) {
            let name = Path::new(&asset.source).with_file_name(source.file_name().expect("a name"));
            let target = tree.join(asset.place(&name));
            fs::create_dir_all(target.parent().expect("a directory")).expect("a directory");
            fs::copy(&source, &target).expect("a copy");
            fs::set_permissions(&target, Permissions::from_mode(asset.mode)).expect("a mode");
        }
    }
    let control = tree.join("DEBIAN");
    fs::create_dir(&control).expect("a directory");
    let fields = [
        "Package: fairlane",
        "Version: 0.1.0-1",
        "Architecture: all",
        "Maintainer: The Fairlane authors <fairlane@example.com>",
        "Description: made by a test",
    ];
    let mut fields: Vec<String> = fields.map(str::to_owned).to_vec();
    for (field, key) in [("Depends", "depends"), ("Recommends", "recommends")] {
        let metadata = metadata();
        let packages = metadata[key].as_str().expect("a text");
        fields.push(format!("{field}: {}", packages.trim_start_matches("$auto, ")));
    }
    fs::write(control.join("control"), fields.join("\n") + "\n").expect("a file");
    let kept = list(&metadata(), "conf-files");
    fs::write(control.join("conffiles"), kept.join("\n") + "\n").expect("a file");
    for name in SCRIPTS {
        let script = root().join("deploy/debian/scripts").join(name);
        fs::copy(script, control.join(name)).expect("a copy");
    }
    let package = directory.join("fairlane.deb");
    run(Command::new("dpkg-deb")
        .args(["--root-owner-group", "-Znone", "--build"])
        .args([&tree, &package]));
    package
}

/// Why this machine cannot show the installation.
fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("only root can make a copy of the system".to_owned());
    }
    if let Some(tool) = TOOLS.iter().find(|tool| !Path::new(tool).exists()) {
        return Some(format!("there is no {tool}"));
    }
    if !is_there("ip") {
        return Some("there is no ip".to_owned());
    }
    if Path::new("/etc/fairlane").exists() {
        return Some("Fairlane is installed on this machine".to_owned());
    }
    // Others came without packages, so apt would look for them in the network.
    let mut asked = Command::new("dpkg-query");
    let asked = asked.args(["-W", "ca-certificates", "redis-server", "systemd"]).output();
    if !asked.expect("dpkg-query runs").status.success() {
        return Some("the packages that Fairlane needs are not installed".to_owned());
    }
    let directory = tempfile::tempdir().expect("a directory");
    let mut mount = Command::new("unshare");
    mount.args(APART).args(["sh", "-euc", COPY, "sh"]).arg(directory.path());
    let output = mount.output().expect("unshare runs");
    (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).into_owned())
}

/// What a script prints about the package.
fn story(script: &str, package: &Path, directory: &Path) -> String {
    let output = Command::new("unshare")
        .args(APART)
        .arg("sh")
        .arg(root().join("tests/it/fixtures").join(script))
        .args([package, directory])
        .output()
        .expect("unshare runs");
    let said = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&said).into_owned()
}

fn assert_all(said: &str, expected: &[&str]) {
    for expected in expected {
        assert!(said.contains(expected), "{expected:?} is missing in:\n{said}");
    }
}

#[test]
fn the_package_installs_starts_upgrades_and_leaves_nothing_behind() {
    if let Some(reason) = missing() {
        return println!("not shown: {reason}");
    }
    let directory = tempfile::tempdir().expect("a directory");
    let package = build(directory.path());
    let place = directory.path().join("copy");
    fs::create_dir(&place).expect("a directory");
    let said = story("package.sh", &package, &place);
    assert_all(
        &said,
        &[
            "600 root:root /etc/fairlane/environment",
            "640 root:fairlane /etc/fairlane/fairlane.toml",
            "700 root:root /etc/fairlane/secrets",
            "700 root:root /etc/fairlane/tokens",
            "700 fairlane:fairlane /var/lib/fairlane",
            "\nenabled\n",
            "== installed: installed 0.1.0-1",
            "== the completions are those of the program",
            "== there are manual pages",
            "== ready",
            "== handled",
            "== stopped",
            "== upgraded\n# a change of the administrator\n",
            "600 root:fairlane /etc/fairlane/fairlane.toml",
            "== removed\nsecret\n",
            "== nothing is left",
            "== no user is left",
        ],
    );
}

#[test]
fn systemd_runs_the_service_with_its_rights_its_secrets_and_its_watchdog() {
    if let Some(reason) = missing() {
        return println!("not shown: {reason}");
    }
    if !Path::new("/lib/systemd/systemd").exists() {
        return println!("not shown: there is no systemd");
    }
    let directory = tempfile::tempdir().expect("a directory");
    let package = build(directory.path());
    let printed = story("systemd.sh", &package, directory.path());
    let said = fs::read_to_string(directory.path().join("said/service"));
    let said = said.unwrap_or_else(|error| panic!("{error}: {printed}"));
    said.lines()
        .filter(|line| line.contains(" after the start of apt"))
        .for_each(|line| println!("{line}"));
    assert_all(
        &said,
        &[
            "== installed by apt, ",
            "== active",
            "== ready",
            "== a private Redis of fairlane, as 1 process",
            "== over HTTP: {\"accepted\":1}",
            "== the first event is handled, ",
            "== type notify",
            "== user fairlane",
            "== no new privileges 1, seccomp 2",
            "== capabilities 0000000000000000",
            "== handled",
            "== reloaded",
            "== restarted",
            "== without the token 401, with it 200",
            "== restarted by the watchdog, 1 time",
            "== ready again",
            "== stopped: success, exit 0",
            "== left processes: \n",
            "== with a wrong configuration: failed, exit 64, 0 restarts",
        ],
    );
}
