//! The image of the `Dockerfile`.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::Command;

use super::{instructions, root, text};

#[test]
fn the_image_is_built_from_files_that_exist() {
    let ignore = text(".dockerignore");
    let mut rules = ignore.lines().filter(|line| !line.starts_with('#'));
    assert_eq!(rules.next(), Some("*"), "nothing is sent to the builder but what follows");
    let sent = |path: &str| {
        ignore.lines().filter_map(|line| line.strip_prefix('!')).any(|rule| {
            rule.strip_suffix('*').map_or(rule == path, |prefix| path.starts_with(prefix))
        })
    };
    let copies = instructions("COPY").into_iter().filter(|copy| !copy.starts_with("--from"));
    let copies: Vec<String> = copies.collect();
    let mut brought = BTreeSet::new();
    for copy in &copies {
        let paths: Vec<&str> = copy.split(' ').collect();
        let (_, sources) = paths.split_last().expect("sources and a target");
        for source in sources {
            assert!(root().join(source).exists(), "{source} is not there");
            assert!(sent(source), "{source} is kept back by .dockerignore");
            brought.insert(*source);
        }
    }
    assert!(brought.is_superset(&BTreeSet::from(["Cargo.toml", "Cargo.lock", "lua", "src"])));
    // Cargo refuses three manifests: a target without a path and without a file, a package without
    // a target, and a workspace without the manifest of a member.
    let manifest: toml::Table = text("Cargo.toml").parse().expect("TOML");
    let mut manifests = vec![("Cargo.toml".to_owned(), manifest.clone())];
    for member in manifest["workspace"]["members"].as_array().expect("members") {
        let path = format!("{}/Cargo.toml", member.as_str().expect("a directory"));
        assert!(brought.contains(path.as_str()), "{path} is missing in the image");
        let manifest: toml::Table = text(&path).parse().expect("TOML");
        let names_target =
            ["lib", "bin", "example"].iter().any(|kind| manifest.contains_key(*kind));
        assert!(names_target, "{path} names no target");
        manifests.push((path, manifest));
    }
    for (path, manifest) in &manifests {
        for kind in ["bench", "test", "example", "bin"] {
            let targets = manifest.get(kind).and_then(toml::Value::as_array).into_iter().flatten();
            for target in targets {
                let has_path = target.get("path").is_some();
                assert!(has_path, "{path}: [[{kind}]] {target} is looked for in the image");
            }
        }
    }
}

#[test]
fn the_image_is_built_by_a_compiler_that_is_new_enough() {
    let manifest: toml::Table = text("Cargo.toml").parse().expect("TOML");
    let needed = manifest["package"]["rust-version"].as_str().expect("a version");
    let base = instructions("FROM").into_iter().find_map(|base| {
        let tag = base.strip_prefix("rust:")?.to_owned();
        Some(tag.split('-').next().unwrap_or_default().to_owned())
    });
    let numbers = |version: &str| -> Vec<u32> {
        version.split('.').map(|part| part.parse().expect("a number")).collect()
    };
    let used = base.expect("an image of Rust");
    assert!(numbers(&used) >= numbers(needed), "{used} is older than {needed}");
}

#[test]
fn the_image_does_not_run_as_root() {
    let user = instructions("USER").pop().expect("a user");
    let (user, group) = user.split_once(':').expect("USER:GROUP");
    for id in [user, group] {
        assert_ne!(id.parse::<u32>().expect("a number, which Kubernetes can check"), 0);
    }
}

#[test]
fn the_health_check_of_the_image_tells_well_from_unwell() {
    let check = instructions("HEALTHCHECK").pop().expect("a health check");
    let (_, command) = check.split_once("CMD ").expect("a command");
    let command: Vec<String> = serde_json::from_str(command).expect("a list");
    let run = |address: SocketAddr| {
        let mut check = Command::new(&command[0]);
        check.args(&command[1..]).env("FAIRLANE__METRICS__LISTEN", address.to_string());
        check.output().expect("it runs").status.success()
    };
    for (status, well) in [("200 OK", true), ("503 Service Unavailable", false)] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address");
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut request = Vec::new();
            // The shell sends each line in a separate write. If the server closed with unread
            // lines, the client would lose the answer.
            for line in BufReader::new(&stream).lines() {
                match line.expect("a request") {
                    line if line.is_empty() => break,
                    line => request.push(line),
                }
            }
            write!(stream, "HTTP/1.1 {status}\r\n\r\n").expect("an answer");
            request
        });
        assert_eq!(run(address), well, "{status}");
        let request = server.join().expect("it answered");
        assert_eq!(request[0], "GET /healthz HTTP/1.1", "{request:?}");
    }
    assert!(!run((Ipv4Addr::LOCALHOST, 1).into()), "nobody listens");
}
