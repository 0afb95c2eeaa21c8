//! The least HTTP client, and a reader of metrics.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Asks for a path; answers the code and the body. Code 0: no answer.
pub(crate) async fn get(address: &str, path: &str) -> (u16, String) {
    let answer = async {
        let mut stream = TcpStream::connect(address).await.ok()?;
        let request =
            format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let code = head.split(' ').nth(1)?.parse().ok()?;
        Some((code, body.to_owned()))
    };
    answer.await.unwrap_or_default()
}

/// The value of the series with this name and all of these labels, others aside.
pub(crate) fn metric(text: &str, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    text.lines().find_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        let (found, rest) = series.split_once('{').unwrap_or((series, ""));
        let has = |(label, value): &(&str, &str)| rest.contains(&format!("{label}=\"{value}\""));
        (found == name && labels.iter().all(has)).then(|| value.parse().unwrap())
    })
}

#[test]
fn a_metric_is_found_by_its_labels() {
    let text = "# HELP a b\na 1\na_total{x=\"1\",y=\"2\"} 7\na_total{x=\"2\",y=\"2\"} 8.5\n";
    assert_eq!(metric(text, "a", &[]), Some(1.0));
    assert_eq!(metric(text, "a_total", &[("y", "2"), ("x", "2")]), Some(8.5));
    assert_eq!(metric(text, "a_total", &[("x", "3")]), None);
}
