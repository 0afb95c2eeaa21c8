//! A Chromium for the tests, and the `DevTools` protocol to it.
//!
//! Messages go through two pipes, and a zero byte ends each message (`--remote-debugging-pipe`). No
//! other program can take or use a pipe as it could a port. If the tests are killed, the pipe
//! closes and Chromium ends.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::oneshot;

use crate::support::wait::holds_within;

/// Maximum time for an answer, including the first one, on a busy machine.
const ANSWER: Duration = Duration::from_secs(60);

/// Starts the first installed program, with its pipes on descriptors 3 to read and 4 to write.
const LAUNCH: &str = r#"
for program in chromium chromium-browser google-chrome-stable google-chrome \
  "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"; do
  if command -v "$program" >/dev/null; then exec "$program" "$@" 3<&0 4>&1 </dev/null >/dev/null; fi
done
echo "Chromium is missing: run \`bash .ci/setup test\`, or \`make test\`, which does" >&2
exit 127"#;

const ARGUMENTS: &[&str] = &[
    "--headless",
    "--remote-debugging-pipe",
    "--no-startup-window",
    "--no-first-run",
    // The processor draws, because the machine may have no graphics card.
    "--disable-gpu",
    // In a container, shared memory is small.
    "--disable-dev-shm-usage",
    // Chromium sends nothing over the network, and keeps nothing after the test.
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--metrics-recording-only",
    "--password-store=basic",
    "--use-mock-keychain",
    // All pages run, also those in the background.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--lang=en-US",
    "--mute-audio",
];

/// Runs until it is dropped, and then leaves neither process nor file behind.
#[derive(Debug)]
pub(super) struct Chromium {
    child: Child,
    /// The profile, the home and the error output.
    directory: TempDir,
    wire: Arc<Wire>,
}

impl Chromium {
    /// The Chromium that other tests use at this moment, or a new one.
    pub(super) fn shared() -> Arc<Self> {
        static RUNNING: Mutex<Weak<Chromium>> = Mutex::new(Weak::new());
        // A holder that panicked had not changed anything yet.
        let mut running = RUNNING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(chromium) = running.upgrade().filter(|chromium| !chromium.wire.has_ended()) {
            return chromium;
        }
        let chromium = Arc::new(Self::start());
        *running = Arc::downgrade(&chromium);
        chromium
    }

    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let home = directory.path();
        let mut command = Command::new("sh");
        command
            .args(["-c", LAUNCH, "sh"])
            .args(ARGUMENTS)
            .arg(format!("--user-data-dir={}", home.join("profile").display()))
            .current_dir(home)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(home.join("log")).unwrap())
            // Its helpers are in the same process group, so that they end together.
            .process_group(0);
        for name in ["HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"] {
            command.env(name, home);
        }
        if rustix::process::geteuid().is_root() {
            // The sandbox of Chromium refuses to run as root.
            command.arg("--no-sandbox");
        }
        let mut child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let wire = Arc::new(Wire { input: Mutex::new(input), state: Mutex::default() });
        let reading = Arc::clone(&wire);
        // The thread ends with the pipe.
        std::thread::spawn(move || reading.read(output));
        Self { child, directory, wire }
    }

    /// Sends a command to a page or to the browser itself, and waits for its answer.
    pub(super) async fn call(
        &self,
        session: Option<&str>,
        method: &str,
        parameters: Value,
    ) -> Result<Value, String> {
        let answer = self.wire.send(session, method, parameters);
        match tokio::time::timeout(ANSWER, answer).await {
            Ok(Ok(answer)) => answer.map_err(|error| format!("{method}: {error}")),
            Ok(Err(_)) => panic!("Chromium has ended:\n{}", self.log()),
            Err(late) => panic!("{method}: {late}: Chromium says\n{}", self.log()),
        }
    }

    /// Sends a command and ignores its answer.
    pub(super) fn tell(&self, method: &str, parameters: Value) {
        drop(self.wire.send(None, method, parameters));
    }

    /// Starts to record the events of a page.
    pub(super) fn watch(&self, session: &str, frame: &str) {
        let seen = Seen { frame: frame.to_owned(), ..Seen::default() };
        self.wire.state.lock().unwrap().pages.insert(session.to_owned(), seen);
    }

    pub(super) fn forget(&self, session: &str) {
        self.wire.state.lock().unwrap().pages.remove(session);
    }

    /// The document that was last loaded completely.
    pub(super) fn loaded(&self, session: &str) -> String {
        self.seen(session, |seen| seen.loaded.clone())
    }

    /// Takes the recorded problems of a page.
    pub(super) fn take_problems(&self, session: &str) -> Vec<String> {
        self.seen(session, |seen| std::mem::take(&mut seen.problems))
    }

    fn seen<T>(&self, session: &str, look: impl FnOnce(&mut Seen) -> T) -> T {
        look(self.wire.state.lock().unwrap().pages.get_mut(session).expect("no watched page"))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        // Kills the whole group. This fails harmlessly if all have ended. The child was not waited
        // for, so the id still belongs to it.
        let group = format!("-{}", self.child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
        let _ = self.child.kill();
        let _ = self.child.wait();
        // A helper may write a last file while it ends.
        let directory = self.directory.path();
        holds_within(Duration::from_secs(10), || {
            fs::remove_dir_all(directory).is_ok() || !directory.exists()
        });
    }
}

type AnswerSender = oneshot::Sender<Result<Value, String>>;

#[derive(Debug)]
struct Wire {
    input: Mutex<ChildStdin>,
    state: Mutex<WireState>,
}

#[derive(Debug, Default)]
struct WireState {
    /// The number of the last command.
    sent: u64,
    /// By the number of the command.
    waiting: HashMap<u64, AnswerSender>,
    /// By session.
    pages: HashMap<String, Seen>,
    has_ended: bool,
}

/// The recorded events of a page.
#[derive(Debug, Default)]
struct Seen {
    /// The page's own frame, which is the outermost one.
    frame: String,
    loaded: String,
    problems: Vec<String>,
}

impl Wire {
    fn has_ended(&self) -> bool {
        self.state.lock().unwrap().has_ended
    }

    fn send(
        &self,
        session: Option<&str>,
        method: &str,
        parameters: Value,
    ) -> oneshot::Receiver<Result<Value, String>> {
        let (answer, answered) = oneshot::channel();
        let id = {
            let mut state = self.state.lock().unwrap();
            state.sent += 1;
            if !state.has_ended {
                let id = state.sent;
                state.waiting.insert(id, answer);
            }
            state.sent
        };
        let mut message = json!({ "id": id, "method": method });
        message["params"] = parameters;
        if let Some(session) = session {
            message["sessionId"] = session.into();
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        // If Chromium has ended, the reading thread reports this to all who wait.
        let _ = self.input.lock().unwrap().write_all(&bytes);
        answered
    }

    /// Reads until Chromium ends.
    fn read(&self, output: ChildStdout) {
        let mut output = BufReader::new(output);
        let mut bytes = Vec::new();
        while output.read_until(0, &mut bytes).is_ok_and(|length| length > 0) {
            if bytes.pop() == Some(0)
                && let Ok(message) = serde_json::from_slice::<Value>(&bytes)
            {
                self.take(message);
            }
            bytes.clear();
        }
        let mut state = self.state.lock().unwrap();
        state.has_ended = true;
        state.waiting.clear();
    }

    fn take(&self, mut message: Value) {
        let mut state = self.state.lock().unwrap();
        if let Some(id) = message["id"].as_u64() {
            let answer = match message.get("error") {
                Some(error) => Err(error["message"].as_str().unwrap_or_default().to_owned()),
                None => Ok(message["result"].take()),
            };
            if let Some(waiting) = state.waiting.remove(&id) {
                // The test may have stopped waiting.
                let _ = waiting.send(answer);
            }
            return;
        }
        let (method, session) = (message["method"].as_str(), message["sessionId"].as_str());
        let (Some(method), Some(session)) = (method, session) else { return };
        let Some(seen) = state.pages.get_mut(session) else { return };
        let event = &message["params"];
        match method {
            "Page.lifecycleEvent" if event["name"] == "load" && event["frameId"] == seen.frame => {
                seen.loaded = text(&event["loaderId"]);
            }
            "Page.javascriptDialogOpening" => {
                seen.problems.push(format!("dialog: {}", text(&event["message"])));
                drop(state);
                // An open dialog blocks the page.
                let no = json!({ "accept": false });
                drop(self.send(Some(session), "Page.handleJavaScriptDialog", no));
            }
            _ => seen.problems.extend(problem(method, event)),
        }
    }
}

/// The problem that an event reports, if any.
fn problem(method: &str, event: &Value) -> Option<String> {
    match method {
        "Log.entryAdded" if event["entry"]["level"] == "error" => {
            let entry = &event["entry"];
            let parts = [&entry["source"], &entry["text"], &entry["url"]].map(text);
            Some(format!("{}: {} ({})", parts[0], parts[1], parts[2]))
        }
        "Runtime.consoleAPICalled" if event["type"] == "error" || event["type"] == "assert" => {
            let parts = event["args"].as_array().into_iter().flatten();
            let parts: Vec<_> =
                parts.map(|part| text(part.get("value").unwrap_or(&part["description"]))).collect();
            Some(format!("console: {}", parts.join(" ")))
        }
        "Runtime.exceptionThrown" => Some(format!("exception: {}", exception(event))),
        "Inspector.targetCrashed" => Some("the page crashed".to_owned()),
        _ => None,
    }
}

/// The exception of an event or an answer, as text.
pub(super) fn exception(thrown: &Value) -> String {
    let details = &thrown["exceptionDetails"];
    let (what, description) =
        (&details["exception"]["value"], &details["exception"]["description"]);
    text([description, what].into_iter().find(|said| said.is_string()).unwrap_or(&details["text"]))
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dropped_chromium_leaves_neither_processes_nor_files() {
        let chromium = Chromium::start();
        let target = json!({ "url": "about:blank" });
        chromium.call(None, "Target.createTarget", target).await.unwrap();
        let directory = chromium.directory.path().to_owned();
        let processes = || {
            let all = Command::new("ps").args(["-A", "-ww", "-o", "args="]).output().unwrap();
            let all = String::from_utf8_lossy(&all.stdout).into_owned();
            all.matches(&*directory.to_string_lossy()).count()
        };
        assert!(processes() > 0 && directory.join("profile").exists());
        drop(chromium);
        assert!(!directory.exists());
        assert!(holds_within(Duration::from_secs(10), || processes() == 0), "{}", processes());
    }
}
