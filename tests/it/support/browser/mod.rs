//! The web pages as users see them: in a real Chromium, with keyboard and mouse.
//!
//! ```ignore
//! let page = Page::open(&instance.client().address).await;
//! assert_eq!(page.goto("/notifications").await, 200);
//! page.sees("Dead letters").await;
//! page.follow(button("Redrive all…")).await;
//! eventually(LONG, "all are gone", async || page.count("#dead tbody tr").await == 0).await;
//! assert_eq!(page.barriers().await, NONE);
//! assert_eq!(page.problems(), NONE);
//! ```
//!
//! Every page has separate cookies and a separate cache, in one Chromium that all concurrent tests
//! share. Chromium starts with the first of these tests and ends with the last. Up to two tests
//! have pages at the same time, and others wait. A page waits up to [`PATIENCE`] for each element
//! that a test looks for. If the element is still missing, the failure shows the page.

mod axe;
mod chromium;
mod tests;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, SemaphorePermit};

use self::chromium::{Chromium, exception};
use super::wait::eventually;

/// Maximum time until an element appears.
const PATIENCE: Duration = Duration::from_secs(20);
/// Maximum number of tests that have pages concurrently: a small machine has two processors.
static TURNS: Semaphore = Semaphore::const_new(2);

/// The expected result of [`Page::problems`] and [`Page::barriers`].
pub(crate) const NONE: [&str; 0] = [];

/// How to find an element. Exactly one must match.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Find<'a> {
    Css(&'a str),
    /// By its role and by its name, as a screen reader reads it.
    Named(&'static [&'static str], &'a str),
}

/// By a CSS selector.
pub(crate) fn css(selector: &str) -> Find<'_> {
    Find::Css(selector)
}

/// A button by its name.
pub(crate) fn button(name: &str) -> Find<'_> {
    Find::Named(&["button"], name)
}

/// A link by its name.
pub(crate) fn link(name: &str) -> Find<'_> {
    Find::Named(&["link"], name)
}

/// An input field by its label.
pub(crate) fn field(name: &str) -> Find<'_> {
    Find::Named(&["textbox", "searchbox", "spinbutton", "combobox", "checkbox", "radio"], name)
}

/// A separate window, isolated from all others. It is closed when it is dropped.
#[derive(Debug)]
pub(crate) struct Page {
    /// `http://HOST:PORT`
    site: String,
    context: String,
    session: String,
    chromium: Arc<Chromium>,
    // Dropped after the browser: the next test to get the turn finds the browser gone or in use.
    turn: Arc<SemaphorePermit<'static>>,
}

impl Page {
    /// Opens an empty window for the pages at an address: 1280 x 800, light.
    pub(crate) async fn open(address: &str) -> Self {
        let turn = TURNS.acquire().await.expect("the semaphore stays open");
        Self::open_in(Arc::new(turn), format!("http://{address}")).await
    }

    /// The window of another user, beside this one. It does not wait for a turn.
    pub(crate) async fn another(&self) -> Self {
        Self::open_in(Arc::clone(&self.turn), self.site.clone()).await
    }

    async fn open_in(turn: Arc<SemaphorePermit<'static>>, site: String) -> Self {
        let chromium = Chromium::shared();
        let browser = async |method: &str, parameters: Value| {
            chromium.call(None, method, parameters).await.unwrap()
        };
        let text = |value: &Value| value.as_str().expect("an id").to_owned();
        let made = browser("Target.createBrowserContext", json!({})).await;
        let context = text(&made["browserContextId"]);
        let target = json!({ "url": "about:blank", "browserContextId": context });
        let target = text(&browser("Target.createTarget", target).await["targetId"]);
        let attach = json!({ "targetId": target, "flatten": true });
        let session = text(&browser("Target.attachToTarget", attach).await["sessionId"]);
        chromium.watch(&session, &target);
        let page = Self { site, context, session, chromium, turn };
        for domain in ["Page", "Runtime", "Log", "Inspector"] {
            page.call(&format!("{domain}.enable"), json!({})).await.unwrap();
        }
        page.call("Page.setLifecycleEventsEnabled", json!({ "enabled": true })).await.unwrap();
        // Makes the page behave as if it had the focus, although other pages do too.
        page.call("Emulation.setFocusEmulationEnabled", json!({ "enabled": true })).await.unwrap();
        page.resize(1280, 800).await;
        page.colours("light").await;
        page
    }

    /// Opens a path of the site and waits until all of it is loaded. Returns the status.
    pub(crate) async fn goto(&self, path: &str) -> u16 {
        let url = format!("{}{path}", self.site);
        let answer = self.call("Page.navigate", json!({ "url": url })).await.unwrap();
        assert!(answer["errorText"].is_null(), "{url}: {answer}");
        // Without a loader id, the address is in the document that is already open.
        if let Some(document) = answer["loaderId"].as_str() {
            let loaded = async || self.chromium.loaded(&self.session) == document;
            eventually(PATIENCE, &format!("{url} is loaded"), loaded).await;
        }
        self.status().await
    }

    /// Loads the page once more. Returns the status.
    pub(crate) async fn reload(&self) -> u16 {
        let reload = async || drop(self.call("Page.reload", json!({})).await.unwrap());
        self.next(reload).await
    }

    /// Clicks an element that opens another page or sends a form. Returns the status of that page.
    pub(crate) async fn follow(&self, what: Find<'_>) -> u16 {
        self.next(async || self.click(what).await).await
    }

    /// Presses a key that opens another page. Returns the status of that page.
    pub(crate) async fn follow_key(&self, key: &str) -> u16 {
        self.next(async || self.press(key).await).await
    }

    /// Clicks an element that changes this page. It must be visible, and no other element may cover
    /// it.
    pub(crate) async fn click(&self, what: Find<'_>) {
        let place: (f64, f64) = self.on(what, include_str!("place.js")).await;
        for (kind, buttons) in [("mouseMoved", 0), ("mousePressed", 1), ("mouseReleased", 0)] {
            let button = if kind == "mouseMoved" { "none" } else { "left" };
            let event = json!({
                "type": kind, "x": place.0, "y": place.1, "button": button, "buttons": buttons,
                "clickCount": u8::from(button == "left"),
            });
            self.call("Input.dispatchMouseEvent", event).await.unwrap();
        }
    }

    /// Replaces the content of a field.
    pub(crate) async fn fill(&self, what: Find<'_>, text: &str) {
        let empty =
            "function() { this.focus(); this.select(); return document.execCommand('delete'); }";
        let _: bool = self.on(what, empty).await;
        self.call("Input.insertText", json!({ "text": text })).await.unwrap();
    }

    /// Presses a key on the focused element: one of [`KEYS`], also as in `Shift+Tab`.
    pub(crate) async fn press(&self, key: &str) {
        let shifted = key.strip_prefix("Shift+");
        let name = shifted.unwrap_or(key);
        let known = KEYS.iter().find(|(known, ..)| *known == name);
        let (_, code, text) = known.unwrap_or_else(|| panic!("no key {name:?} in KEYS"));
        let down = if text.is_empty() { "rawKeyDown" } else { "keyDown" };
        for (kind, text) in [(down, *text), ("keyUp", "")] {
            let event = json!({
                "type": kind, "key": if name == "Space" { " " } else { name }, "code": name,
                "windowsVirtualKeyCode": code, "text": text,
                "modifiers": if shifted.is_some() { 8 } else { 0 },
            });
            self.call("Input.dispatchKeyEvent", event).await.unwrap();
        }
    }

    /// Waits until the drawn page contains a text.
    pub(crate) async fn sees(&self, text: &str) {
        self.until(&format!("sees {text:?}"), async || {
            if self.drawn().await?.contains(text) { Ok(()) } else { Err(String::new()) }
        })
        .await;
    }

    /// Waits until the drawn page does not contain a text.
    pub(crate) async fn sees_no(&self, text: &str) {
        self.until(&format!("sees no {text:?}"), async || {
            if self.drawn().await?.contains(text) { Err(String::new()) } else { Ok(()) }
        })
        .await;
    }

    /// Waits until there is an element.
    pub(crate) async fn has(&self, what: Find<'_>) {
        self.until(&format!("has {what:?}"), async || self.find(what).await.map(drop)).await;
    }

    /// The text of an element as it is drawn, or the content of a field.
    pub(crate) async fn text(&self, what: Find<'_>) -> String {
        let text = "function() { return this.matches('input, textarea, select') ? this.value \
            : this.innerText ?? this.textContent; }";
        self.on(what, text).await
    }

    /// The number of elements that a CSS selector finds now.
    pub(crate) async fn count(&self, selector: &str) -> usize {
        self.eval(&format!("document.querySelectorAll({}).length", json!(selector))).await
    }

    /// The value of an expression, also where the page may not run scripts. Promises are awaited.
    ///
    /// # Panics
    /// If it throws.
    pub(crate) async fn eval<T: DeserializeOwned>(&self, expression: &str) -> T {
        let value = self.until(expression, async || self.evaluate(expression, true).await).await;
        serde_json::from_value(value["value"].clone())
            .unwrap_or_else(|error| panic!("{expression}: {error}: {value}"))
    }

    /// The path, query and fragment that the address bar shows.
    pub(crate) async fn path(&self) -> String {
        self.eval("location.pathname + location.search + location.hash").await
    }

    /// The role and name of the focused element, as in `button "Log in"`.
    pub(crate) async fn focused(&self) -> String {
        let found = self.evaluate("document.activeElement", false).await.unwrap();
        let here = json!({ "objectId": found["objectId"], "fetchRelatives": false });
        let tree = self.call("Accessibility.getPartialAXTree", here).await.unwrap();
        let node = &tree["nodes"][0];
        let part = |name: &str| node[name]["value"].as_str().unwrap_or_default().to_owned();
        format!("{} {:?}", part("role"), part("name"))
    }

    /// Allows or forbids scripts, from the next page on.
    pub(crate) async fn scripts(&self, may_run: bool) {
        let value = json!({ "value": !may_run });
        self.call("Emulation.setScriptExecutionDisabled", value).await.unwrap();
    }

    /// The colour scheme that the user prefers: `light` or `dark`.
    pub(crate) async fn colours(&self, scheme: &str) {
        let feature = json!({ "name": "prefers-color-scheme", "value": scheme });
        self.call("Emulation.setEmulatedMedia", json!({ "features": [feature] })).await.unwrap();
    }

    /// The size of the window, in CSS pixels.
    pub(crate) async fn resize(&self, width: u32, height: u32) {
        let size = json!({
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false,
        });
        self.call("Emulation.setDeviceMetricsOverride", size).await.unwrap();
    }

    /// The whole page as a PNG.
    pub(crate) async fn screenshot(&self, path: &Path) {
        let whole = json!({ "format": "png", "captureBeyondViewport": true });
        let taken = self.call("Page.captureScreenshot", whole).await.unwrap();
        let png = BASE64_STANDARD.decode(taken["data"].as_str().unwrap()).unwrap();
        std::fs::write(path, png).unwrap();
    }

    /// The problems since the page was opened or since the last call. These are errors on the
    /// console, exceptions, answers from 400 on, violations of the content security policy, and
    /// dialogs, which are refused.
    pub(crate) fn problems(&self) -> Vec<String> {
        self.chromium.take_problems(&self.session)
    }

    /// Problems that keep users from using the current page: elements without a name, headings and
    /// ids out of order, too little contrast, content wider than the window.
    pub(crate) async fn barriers(&self) -> Vec<String> {
        let mut found: Vec<String> = self.eval(include_str!("barriers.js")).await;
        let tree = self.call("Accessibility.getFullAXTree", json!({})).await.unwrap();
        for node in tree["nodes"].as_array().into_iter().flatten() {
            let part = |name: &str| node[name]["value"].as_str().unwrap_or_default();
            let (role, name) = (part("role"), part("name"));
            if node["ignored"] != true && NAMED.contains(&role) && name.trim().is_empty() {
                found.push(format!("a {role} has no name"));
            }
        }
        found
    }

    /// Does an action that opens another document, and waits for all of it.
    async fn next(&self, act: impl AsyncFnOnce()) -> u16 {
        let before = self.chromium.loaded(&self.session);
        act().await;
        let loaded = async || self.chromium.loaded(&self.session) != before;
        eventually(PATIENCE, "another page is loaded", loaded).await;
        self.status().await
    }

    async fn status(&self) -> u16 {
        self.eval("performance.getEntriesByType('navigation')[0].responseStatus").await
    }

    async fn drawn(&self) -> Result<String, String> {
        let value = self.evaluate("document.body?.innerText ?? ''", true).await?;
        Ok(value["value"].as_str().unwrap_or_default().to_owned())
    }

    /// Calls a function on an element once it is there. If the function throws a text, the call is
    /// repeated, and the text is the reason.
    async fn on<T: DeserializeOwned>(&self, what: Find<'_>, function: &str) -> T {
        let about = format!("{what:?}");
        let value = self.until(&about, async || {
            let element = self.find(what).await?;
            let call = json!({
                "objectId": element, "functionDeclaration": function, "returnByValue": true,
            });
            let answer = self.call("Runtime.callFunctionOn", call).await?;
            if answer.get("exceptionDetails").is_some() {
                return Err(exception(&answer));
            }
            Ok(answer["result"]["value"].clone())
        });
        let value = value.await;
        serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value}"))
    }

    /// The one element that matches.
    async fn find(&self, what: Find<'_>) -> Result<Value, String> {
        let found = match what {
            Find::Css(selector) => {
                let all = format!("document.querySelectorAll({})", json!(selector));
                let count = self.evaluate(&format!("{all}.length"), true).await?;
                let first = self.evaluate(&format!("{all}[0]"), false).await?;
                let count = count["value"].as_u64().unwrap_or_default();
                vec![first["objectId"].clone(); usize::try_from(count).unwrap()]
            }
            Find::Named(roles, name) => {
                let document = self.evaluate("document", false).await?;
                let query = json!({ "objectId": document["objectId"], "accessibleName": name });
                let answer = self.call("Accessibility.queryAXTree", query).await?;
                let mut found = Vec::new();
                for node in answer["nodes"].as_array().into_iter().flatten() {
                    let role = node["role"]["value"].as_str().unwrap_or_default();
                    if node["ignored"] == true || !roles.contains(&role) {
                        continue;
                    }
                    let node = json!({ "backendNodeId": node["backendDOMNodeId"] });
                    let node = self.call("DOM.resolveNode", node).await?;
                    found.push(node["object"]["objectId"].clone());
                }
                found
            }
        };
        match found.as_slice() {
            [one] => Ok(one.clone()),
            all => Err(format!("there are {}", all.len())),
        }
    }

    async fn evaluate(&self, expression: &str, by_value: bool) -> Result<Value, String> {
        let evaluate = json!({
            "expression": expression, "returnByValue": by_value, "awaitPromise": true,
        });
        let answer = self.call("Runtime.evaluate", evaluate).await?;
        let thrown = answer.get("exceptionDetails").map(|_| exception(&answer));
        assert_eq!(thrown, None, "{expression}");
        Ok(answer["result"].clone())
    }

    /// Tries until it succeeds. While a page is replaced by the next, every attempt fails.
    async fn until<T>(&self, what: &str, mut attempt: impl AsyncFnMut() -> Result<T, String>) -> T {
        let begun = Instant::now();
        let mut last = Err(String::new());
        eventually(PATIENCE * 2, what, async || {
            last = attempt().await;
            last.is_ok() || begun.elapsed() > PATIENCE
        })
        .await;
        match last {
            Ok(value) => value,
            Err(why) => {
                let problems = self.problems();
                let drawn = self.drawn().await.unwrap_or_default();
                panic!("not within {PATIENCE:?}: {what}: {why}\n{problems:#?}\nbut:\n{drawn}");
            }
        }
    }

    async fn call(&self, method: &str, parameters: Value) -> Result<Value, String> {
        self.chromium.call(Some(&self.session), method, parameters).await
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.chromium.forget(&self.session);
        let context = json!({ "browserContextId": self.context });
        self.chromium.tell("Target.disposeBrowserContext", context);
    }
}

/// Roles whose elements need a name.
const NAMED: &[&str] = &[
    "button",
    "checkbox",
    "combobox",
    "img",
    "image",
    "link",
    "listbox",
    "meter",
    "progressbar",
    "radio",
    "region",
    "searchbox",
    "slider",
    "spinbutton",
    "switch",
    "SvgRoot",
    "tab",
    "textbox",
];

/// Keys, their codes on Windows, and the text that they write.
const KEYS: &[(&str, u32, &str)] = &[
    ("Backspace", 8, ""),
    ("Tab", 9, ""),
    ("Enter", 13, "\r"),
    ("Escape", 27, ""),
    ("Space", 32, " "),
    ("End", 35, ""),
    ("Home", 36, ""),
    ("ArrowLeft", 37, ""),
    ("ArrowUp", 38, ""),
    ("ArrowRight", 39, ""),
    ("ArrowDown", 40, ""),
];
