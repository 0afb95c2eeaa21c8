//! A pseudo-terminal, with a shell in it.

use std::io::{Read as _, Write as _};
use std::num::NonZeroU16;
use std::path::Path;
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pty_process::Size;
use pty_process::blocking::{Command, Pty};

use super::wait::eventually;

const LONG: Duration = Duration::from_secs(30);

/// What runs in it is killed when it is dropped.
pub(crate) struct Terminal {
    pty: Arc<Pty>,
    child: Child,
    screen: Arc<Mutex<vt100::Parser>>,
}

fn size(lines: u16) -> NonZeroU16 {
    NonZeroU16::new(lines).expect("a terminal has lines and columns")
}

impl Terminal {
    /// Runs a script of `sh` in a terminal of 80 × 24.
    pub(crate) fn run(directory: &Path, script: &str, env: &[(&str, &str)]) -> Self {
        let (rows, columns) = (24, 80);
        let (pty, inside) = pty_process::blocking::open().unwrap();
        pty.resize(Size::new(rows, columns)).unwrap();
        let child = Command::new("sh")
            .args(["-c", script])
            .current_dir(directory)
            .env_remove("RUST_LOG")
            .env_remove("NO_COLOR")
            .env("TERM", "xterm-256color")
            .envs(env.iter().copied())
            .spawn(inside)
            .unwrap();
        let pty = Arc::new(pty);
        let screen = Arc::new(Mutex::new(vt100::Parser::new(size(rows), size(columns), 1_000)));
        let (from, to) = (Arc::clone(&pty), Arc::clone(&screen));
        // The thread ends with the last process in the terminal.
        std::thread::spawn(move || {
            let mut bytes = [0; 4_096];
            while let Ok(count @ 1..) = (&*from).read(&mut bytes) {
                to.lock().unwrap().process(&bytes[..count]);
            }
        });
        Self { pty, child, screen }
    }

    /// The process id of the shell.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn keys(&self, keys: &str) {
        (&*self.pty).write_all(keys.as_bytes()).unwrap();
    }

    pub(crate) fn resize(&self, rows: u16, columns: u16) {
        self.screen.lock().unwrap().set_size(size(rows), size(columns));
        self.pty.resize(Size::new(rows, columns)).unwrap();
    }

    /// The text on the screen.
    pub(crate) fn text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    /// Waits until the screen shows a text.
    pub(crate) async fn until(&self, text: &str) {
        self.until_that(text, |shown| shown.contains(text)).await;
    }

    /// Waits until the text on the screen fulfils this.
    pub(crate) async fn until_that(&self, what: &str, is_so: impl Fn(&str) -> bool) {
        let shown = async || is_so(&self.text());
        let wait = eventually(LONG, what, shown);
        let waited = tokio::time::timeout(2 * LONG, wait).await;
        assert!(waited.is_ok(), "the screen does not show {what:?}:\n{}", self.text());
    }

    /// Whether a program has taken the whole screen.
    pub(crate) fn is_taken(&self) -> bool {
        self.screen.lock().unwrap().screen().alternate_screen()
    }

    /// Whether the cursor is hidden.
    pub(crate) fn hides_cursor(&self) -> bool {
        self.screen.lock().unwrap().screen().hide_cursor()
    }

    /// Whether any text has a colour.
    pub(crate) fn has_colours(&self) -> bool {
        let screen = self.screen.lock().unwrap();
        let screen = screen.screen();
        let (rows, columns) = screen.size();
        let (rows, columns) = (rows.get(), columns.get());
        let cells = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
        let mut cells = cells.filter_map(|(row, column)| screen.cell(row, column));
        cells.any(|cell| cell.fgcolor() != vt100::Color::Default)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
