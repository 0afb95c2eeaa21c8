//! Tests of the browser support: it finds the problems that it must find.

use super::*;
use crate::support::receiver::{Call, Receiver, Reply};

/// A site with one page for each path.
async fn site(pages: &'static [(&'static str, &'static str)]) -> (Receiver, Page) {
    let answer = async move |call: Call| {
        let path = call.line.split(' ').nth(1).unwrap_or_default();
        match pages.iter().find(|(known, _)| *known == path) {
            Some((_, body)) => {
                let body = format!("<!doctype html><html lang=en><title>T</title>{body}");
                Reply::new(200, body).with("content-type", "text/html; charset=utf-8")
            }
            // Chromium requests this on its own.
            None if path == "/favicon.ico" => Reply::new(200, ""),
            // An empty body would count as another problem.
            None => Reply::new(404, "nothing here"),
        }
    };
    let receiver = Receiver::start(answer).await;
    let page = Page::open(&receiver.address.to_string()).await;
    (receiver, page)
}

#[tokio::test]
async fn an_error_in_a_page_is_told_once() {
    let (_site, page) = site(&[
        ("/good", "<h1>Good</h1><script>console.log('fine')</script>"),
        ("/error", "<script>console.error('this', 7)</script>"),
        ("/throws", "<script>throw new Error('thrown')</script>"),
        ("/missing", "<img src=/nowhere alt=x>"),
        ("/dialog", "<script>alert('hello'); document.title = 'on'</script>"),
        (
            "/policy",
            "<meta http-equiv=content-security-policy content=\"default-src 'none'\">\
             <script>document.title = 'ran'</script>",
        ),
    ])
    .await;
    assert_eq!(page.goto("/good").await, 200);
    assert_eq!(page.problems(), NONE);
    for (path, expected) in [
        ("/error", "console: this 7"),
        ("/throws", "exception: Error: thrown"),
        ("/missing", "404"),
        ("/dialog", "dialog: hello"),
        ("/policy", "security: Executing inline script violates"),
    ] {
        page.goto(path).await;
        let mut found = Vec::new();
        eventually(PATIENCE, path, async || {
            found.extend(page.problems());
            !found.is_empty()
        })
        .await;
        assert!(found.len() == 1 && found[0].contains(expected), "{path}: {found:?}");
    }
    assert_eq!(page.eval::<String>("document.title").await, "T", "the policy held");
    assert_eq!(page.goto("/nowhere").await, 404);
}

#[tokio::test]
async fn accessibility_barriers_are_found() {
    let (_site, page) = site(&[
        (
            "/bad",
            "<h1>A</h1><h1>B</h1><h3 id=x>C</h3><p id=x style='color:#999;background:#fff'>pale</p>\
             <button></button><input style='border:1px solid #999'><input style='border:0'><img src='data:,'>\
             <svg role=img></svg><a href=/>named</a>\
             <table><tr><th>head</table><p tabindex=1 style='width:2000px'>wide</p>",
        ),
        (
            "/good",
            "<style>:root{color-scheme:light dark}</style><h1>A</h1><h2>B</h2><button>Go</button>\
             <label>Name <input></label><svg role=img aria-label=chart></svg>",
        ),
    ])
    .await;
    page.goto("/bad").await;
    let found = page.barriers().await.join("\n");
    for expected in [
        "2 h1 instead of one",
        "<h3> \"C\" follows a heading of level 1",
        "the id x is there twice",
        "<p> \"pale\" has a contrast of 2.8 instead of 4.5",
        "<input> \"\" has a border with a contrast of 2.8 instead of 3",
        "<input> \"\" has no border",
        "a button has no name",
        "a textbox has no name",
        "<th> \"head\" has no scope",
        "jumps the order of the Tab key",
        "px wider than the window",
    ] {
        assert!(found.contains(expected), "{expected} is not in\n{found}");
    }
    assert_eq!(found.matches("a image has no name").count(), 2, "{found}");
    page.goto("/good").await;
    for scheme in ["light", "dark"] {
        page.colours(scheme).await;
        assert_eq!(page.barriers().await, NONE, "{scheme}");
    }
}

#[tokio::test]
async fn only_visible_elements_are_clicked_and_keys_go_to_the_focus() {
    let (_site, page) = site(&[
        (
            "/",
            "<script>const late = () => document.querySelector('#over').remove()</script>\
             <div id=over style='position:fixed;inset:0'></div><p style='height:3000px'></p>\
             <button onclick='out.textContent += `clicked;`'>Far <b>down</b></button>\
             <form action=/next><label>Name <input name=n value=before></label></form>\
             <a href=/next?by=link>A link</a><output id=out></output>",
        ),
        ("/next?n=h%26llo", "<h1>Sent</h1>"),
        ("/next?by=link", "<noscript>None runs</noscript><h1>Linked</h1>"),
    ])
    .await;
    page.goto("/").await;
    // The click waits until no element covers the button.
    page.eval::<Value>("void setTimeout(late, 200)").await;
    page.click(button("Far down")).await;
    page.sees("clicked;").await;
    page.sees_no("clicked;clicked;").await;
    assert_eq!(page.focused().await, "button \"Far down\"");
    page.press("Space").await;
    page.sees("clicked;clicked;").await;
    page.press("Tab").await;
    assert_eq!(page.focused().await, "textbox \"Name\"");
    page.press("Shift+Tab").await;
    assert_eq!(page.focused().await, "button \"Far down\"");
    page.fill(field("Name"), "h&llo").await;
    assert_eq!(page.text(field("Name")).await, "h&llo");
    assert_eq!(page.follow_key("Enter").await, 200);
    assert_eq!(page.path().await, "/next?n=h%26llo");
    page.goto("/").await;
    page.eval::<Value>("late()").await;
    page.scripts(false).await;
    page.follow(link("A link")).await;
    page.has(css("noscript")).await;
    assert!(page.text(css("body")).await.contains("None runs"));
    page.scripts(true).await;
    page.reload().await;
    page.sees_no("None runs").await;
    assert_eq!(page.problems(), NONE);
}

#[tokio::test]
async fn each_page_has_a_window_and_cookies_of_its_own() {
    let (_site, one) = site(&[("/", "<h1>Here</h1>")]).await;
    let other = one.another().await;
    assert!(Arc::ptr_eq(&one.chromium, &other.chromium), "in one Chromium");
    for page in [&one, &other] {
        page.goto("/").await;
    }
    one.eval::<Value>("void (document.cookie = 'a=1')").await;
    assert_eq!(other.eval::<String>("document.cookie").await, "");
    one.resize(400, 300).await;
    let size = "[innerWidth, innerHeight]";
    assert_eq!(one.eval::<[u32; 2]>(size).await, [400, 300]);
    assert_eq!(other.eval::<[u32; 2]>(size).await, [1280, 800]);
    let directory = tempfile::tempdir().unwrap();
    let picture = directory.path().join("page.png");
    one.screenshot(&picture).await;
    let png = std::fs::read(picture).unwrap();
    assert!(png.starts_with(b"\x89PNG"));
    assert_eq!(png[16..24], [0, 0, 1, 144, 0, 0, 1, 44], "400 x 300");
}

#[tokio::test]
async fn the_rules_of_axe_find_what_they_must() {
    let (_site, page) = site(&[
        ("/good", "<main><h1>Good</h1><p>Text</p></main>"),
        ("/bad", "<main><h1>Bad</h1><input><img src=/favicon.ico></main>"),
    ])
    .await;
    page.goto("/good").await;
    let found = page.violations().await;
    assert!(found.is_empty(), "{found:?}");
    page.goto("/bad").await;
    let found = page.violations().await;
    for rule in ["label:", "image-alt:"] {
        let named = found.iter().find(|one| one.about.starts_with(rule));
        assert!(named.is_some_and(|one| one.impact == "critical"), "{rule}: {found:?}");
    }
}
