use proptest::prelude::*;

use super::*;

fn tenant(nets: &[&str]) -> Policy {
    Policy::Tenant(nets.iter().map(|net| net.parse().unwrap()).collect())
}

fn parse(text: &str) -> Result<CheckedUrl, UrlError> {
    CheckedUrl::parse(text, &tenant(&[]))
}

#[test]
fn addresses_with_a_special_purpose_are_refused() {
    let refused = [
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "10.255.255.255",
        "100.64.0.1",
        "100.127.255.255",
        "127.0.0.1",
        "127.255.255.254",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.1",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.0.1",
        "198.18.0.1",
        "198.19.255.255",
        "198.51.100.7",
        "203.0.113.9",
        "224.0.0.1",
        "239.1.1.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::8.8.8.8",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::127.0.0.1",
        "64:ff9b::a00:1",
        "64:ff9b:1::1",
        "64:ff9b:1::808:808",
        "100::1",
        "2001::1",
        "2001:0:4136:e378::1",
        "2001:2::1",
        "2001:10::1",
        "2001:20::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:a00:1::1",
        "2002:c0a8:101::",
        "3fff::1",
        "3fff:fff::1",
        "4000::1",
        "5f00::1",
        "fc00::1",
        "fd12:3456::1",
        "fe80::1",
        "febf::1",
        "fec0::1",
        "ff02::1",
    ];
    for text in refused {
        let address: IpAddr = text.parse().unwrap();
        assert!(!tenant(&[]).allows(address), "{text}");
        assert!(Policy::Operator.allows(address), "{text}");
    }
}

#[test]
fn public_addresses_are_allowed() {
    let allowed = [
        "1.1.1.1",
        "8.8.8.8",
        "9.255.255.255",
        "11.0.0.1",
        "100.63.255.255",
        "100.128.0.1",
        "126.255.255.255",
        "128.0.0.1",
        "169.253.0.1",
        "172.15.255.255",
        "172.32.0.1",
        "191.255.255.255",
        "192.0.1.1",
        "192.0.3.1",
        "192.88.98.1",
        "192.167.1.1",
        "192.169.0.1",
        "198.17.255.255",
        "198.20.0.1",
        "198.51.99.1",
        "203.0.112.1",
        "223.255.255.255",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
        "2001:200::1",
        "2001:4860:4860::8888",
        "2002:808:808::1",
        "2606:4700::1111",
        "3ffe::1",
    ];
    for text in allowed {
        assert!(tenant(&[]).allows(text.parse().unwrap()), "{text}");
    }
}

#[test]
fn networks_of_the_operator_are_allowed_however_an_address_in_them_is_written() {
    let policy = tenant(&["10.1.0.0/16", "fd00:1::/32"]);
    for text in ["10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd00:1::7"] {
        assert!(policy.allows(text.parse().unwrap()), "{text}");
    }
    // A 6to4 address does not belong to the network of the embedded address, because its packets go
    // to a relay.
    for text in ["10.2.0.1", "127.0.0.1", "fd00:2::1", "2002:a01:203::1"] {
        assert!(!policy.allows(text.parse().unwrap()), "{text}");
    }
}

#[test]
fn one_address_is_refused_in_every_spelling() {
    let spellings = [
        "127.0.0.1",
        "127.0.0.1.",
        "127.1",
        "127.0.1",
        "2130706433",
        "0x7f000001",
        "0X7F.1",
        "017700000001",
        "0177.0.0.01",
        "0x7f.0x0.0x0.0x1",
        "127.0.0.0x1",
        "%31%32%37.0.0.1",
        "127%2e0%2E0.1",
        "１２７.0.0.1",
        "127。0。0。1",
        "①②⑦.⓪.⓪.①",
        "[::1]",
        "[::]",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[0:0:0:0:0:FFFF:7f00:0001]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "0",
        "0.0.0.0",
        "0x0",
        "169.254.169.254",
        "0xa9fea9fe",
        "2852039166",
        "[::ffff:a9fe:a9fe]",
        "[fe80::1]",
        "[fd00:ec2::254]",
    ];
    for spelling in spellings {
        for text in [
            format!("http://{spelling}/"),
            format!("https://{spelling}:8443/x?y=z"),
            format!("HTTP:\\\\{spelling}\\"),
            format!("http:/{spelling}"),
            format!("http:{spelling}"),
        ] {
            match parse(&text) {
                Err(UrlError::Address(_)) => {}
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_host_that_is_no_address_and_no_name_makes_no_url() {
    for text in [
        "",
        "/",
        "x",
        "//host/",
        "http://",
        "http:///",
        "http://[::1",
        "http://[fe80::1%25eth0]/",
        "http://[fe80::1%eth0]/",
        "http://1.2.3.4.5/",
        "http://256.1.1.1/",
        "http://0x100000000/",
        "http://a b/",
        "http://a\tb/",
        "http://a\n/",
        " http://8.8.8.8/",
        "http://%00/",
        "http://a%2fb/",
        "http://host:port/",
        "http://host:70000/",
        "http://xn--/",
    ] {
        assert!(parse(text).is_err(), "{text:?}");
    }
}

#[test]
fn each_rule_explains_its_refusal() {
    let long = format!("http://8.8.8.8/{}", "x".repeat(URL_MAX_BYTES));
    let broken = [
        ("ftp://8.8.8.8/", UrlError::Scheme),
        ("file:///etc/passwd", UrlError::Scheme),
        ("javascript:alert(1)", UrlError::Scheme),
        ("http://user@8.8.8.8/", UrlError::Credentials),
        ("http://:secret@8.8.8.8/", UrlError::Credentials),
        ("http://8.8.8.8@127.0.0.1/", UrlError::Credentials),
        ("http://8.8.8.8/#x", UrlError::Fragment),
        ("http://8.8.8.8/#@127.0.0.1", UrlError::Fragment),
        ("http://8.8.8.8:25/", UrlError::Port(25)),
        ("http://8.8.8.8:0/", UrlError::Port(0)),
        ("http://%22/", UrlError::Unsendable),
        (&long, UrlError::TooLong(long.len())),
    ];
    for (text, expected) in broken {
        assert_eq!(parse(text).unwrap_err(), expected, "{text}");
        let message = expected.to_string();
        assert!(!message.contains("secret@"), "{message}");
    }
}

#[test]
fn the_operators_own_url_may_be_internal_and_nothing_else() {
    let url = CheckedUrl::parse("http://127.0.0.1:9000/hook?token=secret", &Policy::Operator);
    let url = url.unwrap();
    assert_eq!((url.host(), url.port(), url.is_operators()), ("127.0.0.1", 9000, true));
    assert_eq!(url.to_string(), "http://127.0.0.1:9000/hook");
    assert_eq!(format!("{url:?}"), "CheckedUrl(http://127.0.0.1:9000/hook)");
    for text in ["http://u:p@127.0.0.1/", "ftp://127.0.0.1/", "http://127.0.0.1:22/"] {
        assert!(CheckedUrl::parse(text, &Policy::Operator).is_err(), "{text}");
    }
}

#[test]
fn a_name_is_judged_when_it_is_connected_to() {
    for text in ["http://localhosts/", "https://Example.COM:8443/a?b", "http://metadata.internal."]
    {
        let url = parse(text).unwrap();
        assert_eq!(url.literal(), None, "{text}");
    }
    assert_eq!(parse("https://Example.COM/").unwrap().host(), "example.com");
    assert_eq!(parse("https://Example.COM/").unwrap().port(), 443);
}

#[test]
fn names_of_this_machine_are_refused_unless_the_loopback_is_allowed() {
    let hosts =
        ["localhost", "LOCALHOST", "localhost.", "a.localhost", "a.b.localhost.", "a.localhost.."];
    for host in hosts {
        let text = format!("http://{host}:8080/");
        assert!(matches!(parse(&text), Err(UrlError::Address(_))), "{text}");
        let nets: Arc<[IpNet]> = Arc::new(["127.0.0.0/8".parse().unwrap()]);
        assert!(CheckedUrl::parse(&text, &Policy::Tenant(nets)).is_ok(), "{text}");
        assert!(CheckedUrl::parse(&text, &Policy::Operator).is_ok(), "{text}");
    }
}

/// A v4 address with a special purpose.
fn internal_v4() -> impl Strategy<Value = Ipv4Addr> {
    let net = prop::sample::select(vec![
        (0x0000_0000_u32, 8_u32),
        (0x0a00_0000, 8),
        (0x6440_0000, 10),
        (0x7f00_0000, 8),
        (0xa9fe_0000, 16),
        (0xac10_0000, 12),
        (0xc0a8_0000, 16),
        (0xc612_0000, 15),
        (0xe000_0000, 4),
        (0xf000_0000, 4),
    ]);
    (net, any::<u32>())
        .prop_map(|((base, bits), host)| Ipv4Addr::from(base | (host & (u32::MAX >> bits))))
}

/// One number in a base, percent-encoded or in full-width digits.
fn spell(number: u64, base: u8, dress: u8) -> String {
    let plain = match base {
        0 => format!("{number}"),
        1 => format!("0x{number:x}"),
        2 => format!("0X{number:X}"),
        _ => format!("0{number:o}"),
    };
    let dressed = plain.chars().map(|c| match dress {
        1 => format!("%{:02x}", u32::from(c)),
        2 if c.is_ascii_digit() => {
            char::from_u32(0xff10 + c.to_digit(10).unwrap()).unwrap().to_string()
        }
        _ => c.to_string(),
    });
    dressed.collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_spelling_of_an_internal_v4_address_is_allowed(
        address in internal_v4(),
        parts in 1_usize..=4,
        bases in prop::array::uniform4(0_u8..4),
        dresses in prop::array::uniform4(0_u8..3),
        dot in prop::sample::select(vec![".", "%2e", "。", "．"]),
        trailing in any::<bool>(),
        tail in prop::sample::select(vec!["", "/", "/a?b=c", ":8080/", ":443", "\\x"]),
    ) {
        let octets = address.octets().map(u64::from);
        let mut numbers: Vec<u64> = octets[..parts - 1].to_vec();
        numbers.push(octets[parts - 1..].iter().fold(0, |all, octet| (all << 8) | octet));
        let spelled: Vec<String> = numbers
            .iter()
            .enumerate()
            .map(|(at, number)| spell(*number, bases[at], dresses[at]))
            .collect();
        let host = spelled.join(dot) + if trailing { dot } else { "" };
        let text = format!("http://{host}{tail}");
        match parse(&text) {
            Err(UrlError::Address(refused)) => prop_assert_eq!(refused.address, address),
            other => prop_assert!(false, "{}: {:?}", text, other),
        }
    }

    #[test]
    fn no_v6_address_that_holds_an_internal_v4_address_is_allowed(
        address in internal_v4(),
        prefix in prop::sample::select(vec!["::ffff:", "::", "64:ff9b::", "0:0:0:0:0:ffff:"]),
        dotted in any::<bool>(),
    ) {
        let [a, b, c, d] = address.octets();
        let tail = if dotted {
            address.to_string()
        } else {
            format!("{:x}:{:x}", u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]))
        };
        let text = format!("http://[{prefix}{tail}]/");
        prop_assert!(matches!(parse(&text), Err(UrlError::Address(_))), "{}", text);
    }

    #[test]
    fn nothing_makes_the_check_panic_and_nothing_internal_passes(text in "\\PC{0,40}") {
        for text in [text.clone(), format!("http://{text}"), format!("https://{text}/")] {
            if let Ok(url) = parse(&text) {
                prop_assert!(url.literal().is_none_or(is_public), "{}", text);
                prop_assert!(!url.host().is_empty());
            }
        }
    }

    #[test]
    fn the_client_sees_the_host_that_was_judged(text in "[a-z0-9.%@:\\[\\]x/\\\\-]{1,30}") {
        if let Ok(url) = parse(&format!("http://{text}")) {
            let uri: Uri = url.expose().as_str().parse().unwrap();
            prop_assert_eq!(uri.host(), Some(url.host()));
        }
    }
}
