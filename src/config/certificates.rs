//! The certificates of TLS connections to Redis, read from PEM files.

use std::fs;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use redis::{ClientTlsConfig, TlsCertificates};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::RedisConfig;

/// A file that cannot be used, with the key that names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unusable {
    pub(super) key: &'static str,
    pub(super) problem: String,
}

/// Reads the certificates that `redis` names. `None` if it names none; then the system's roots are
/// trusted.
pub(super) fn read(redis: &RedisConfig) -> Result<Option<TlsCertificates>, Unusable> {
    let authority = redis.ca_file.as_deref().map(|path| certificates("redis.ca_file", path));
    let authority = authority.transpose()?;
    let client = match (&redis.cert_file, &redis.key_file) {
        (Some(cert), Some(key)) => Some(identity(cert, key)?),
        (None, None) => None,
        (cert, _) => {
            let (key, other) = match cert {
                Some(_) => ("redis.key_file", "redis.cert_file"),
                None => ("redis.cert_file", "redis.key_file"),
            };
            let problem = format!("is not set, but {other} is; set both, or neither");
            return Err(Unusable { key, problem });
        }
    };
    if authority.is_none() && client.is_none() {
        return Ok(None);
    }
    let root_cert = authority.map(|pem| [system_roots(), pem].concat());
    Ok(Some(TlsCertificates { client_tls: client, root_cert }))
}

/// The certificate and key for mutual TLS.
fn identity(cert: &Path, key: &Path) -> Result<ClientTlsConfig, Unusable> {
    const KEY: &str = "redis.key_file";
    let client_cert = certificates("redis.cert_file", cert)?;
    let client_key = text(KEY, key)?;
    if let Err(error) = PrivateKeyDer::from_pem_slice(&client_key) {
        return Err(unusable(KEY, key, &format!("holds no private key in PEM ({error})")));
    }
    Ok(ClientTlsConfig { client_cert, client_key })
}

/// Reads a file with at least one certificate, unchanged.
fn certificates(key: &'static str, path: &Path) -> Result<Vec<u8>, Unusable> {
    let pem = text(key, path)?;
    let mut count = 0;
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let added = certificate
            .map_err(|error| error.to_string())
            .and_then(|der| RootCertStore::empty().add(der).map_err(|error| error.to_string()));
        added.map_err(|error| {
            unusable(key, path, &format!("holds something that is no certificate ({error})"))
        })?;
        count += 1;
    }
    if count == 0 {
        return Err(unusable(key, path, "holds no certificate in PEM"));
    }
    Ok(pem)
}

fn text(key: &'static str, path: &Path) -> Result<Vec<u8>, Unusable> {
    fs::read(path).map_err(|error| unusable(key, path, &format!("cannot be read ({error})")))
}

fn unusable(key: &'static str, path: &Path, problem: &str) -> Unusable {
    Unusable { key, problem: format!("names {}, which {problem}", path.display()) }
}

/// The system's trusted certificates as PEM. The client replaces them with the list it gets, so the
/// list must contain them. Unusable ones are left out.
fn system_roots() -> Vec<u8> {
    let mut pem = String::new();
    for certificate in rustls_native_certs::load_native_certs().certs {
        if RootCertStore::empty().add(certificate.clone()).is_ok() {
            pem.push_str("-----BEGIN CERTIFICATE-----\n");
            pem.push_str(&base64::engine::general_purpose::STANDARD.encode(&certificate));
            pem.push_str("\n-----END CERTIFICATE-----\n");
        }
    }
    pem.into_bytes()
}

/// A path, unless the setting is empty.
pub(super) fn path(text: &str) -> Option<PathBuf> {
    Some(text).filter(|text| !text.is_empty()).map(PathBuf::from)
}
