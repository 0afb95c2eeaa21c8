//! The certificates of TLS connections to Redis and to other buses, read from PEM files.

use std::fs;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use redis::{ClientTlsConfig, TlsCertificates};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

use super::{RedisConfig, TlsFiles};

/// A file that cannot be used, with the key that names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unusable {
    pub(super) key: String,
    pub(super) problem: String,
}

/// Reads the certificates that `redis` names. `None` if it names none; then the system's roots are
/// trusted.
pub(super) fn read(redis: &RedisConfig) -> Result<Option<TlsCertificates>, Unusable> {
    let (ca, cert, key) = (&redis.ca_file, &redis.cert_file, &redis.key_file);
    let read = read_files("redis.", ca.as_deref(), cert.as_deref(), key.as_deref())?;
    if read.authority.is_none() && read.client.is_none() {
        return Ok(None);
    }
    let root_cert = read.authority.map(with_system_roots);
    let client_tls =
        read.client.map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key });
    Ok(Some(TlsCertificates { client_tls, root_cert }))
}

/// Checks the files that a source of events names. `prefix` precedes their keys.
pub(super) fn check(prefix: &str, files: &TlsFiles) -> Result<(), Unusable> {
    let (ca, cert, key) = (&files.ca_file, &files.cert_file, &files.key_file);
    read_files(prefix, ca.as_deref(), cert.as_deref(), key.as_deref()).map(drop)
}

impl TlsFiles {
    /// All certificates to trust in PEM: those of the system and those of [`Self::ca_file`].
    ///
    /// # Errors
    /// The text of why that file cannot be used.
    pub fn trusted(&self) -> Result<Vec<u8>, String> {
        let own = self.ca_file.as_deref().map(|path| certificates("ca_file", path)).transpose();
        let own = own.map_err(|unusable| format!("{} {}", unusable.key, unusable.problem))?;
        Ok(with_system_roots(own.unwrap_or_default()))
    }
}

/// What the files hold, in PEM.
struct Contents {
    authority: Option<Vec<u8>>,
    /// The certificate and key for mutual TLS.
    client: Option<(Vec<u8>, Vec<u8>)>,
}

fn read_files(
    prefix: &str,
    authority: Option<&Path>,
    cert: Option<&Path>,
    key: Option<&Path>,
) -> Result<Contents, Unusable> {
    let [ca_file, cert_file, key_file] =
        ["ca_file", "cert_file", "key_file"].map(|name| format!("{prefix}{name}"));
    let authority = authority.map(|path| certificates(&ca_file, path)).transpose()?;
    let client = match (cert, key) {
        (Some(cert), Some(key)) => {
            let (chain, secret) = (certificates(&cert_file, cert)?, private_key(&key_file, key)?);
            if !belongs(&secret, &chain) {
                let problem =
                    format!("does not belong to {cert_file}; name the key of that certificate");
                return Err(unusable(&key_file, key, &problem));
            }
            Some((chain, secret))
        }
        (None, None) => None,
        (cert, _) => {
            let (key, other) = match cert {
                Some(_) => (key_file, cert_file),
                None => (cert_file, key_file),
            };
            let problem = format!("is not set, but {other} is; set both, or neither");
            return Err(Unusable { key, problem });
        }
    };
    Ok(Contents { authority, client })
}

fn private_key(key: &str, path: &Path) -> Result<Vec<u8>, Unusable> {
    let pem = text(key, path)?;
    match PrivateKeyDer::from_pem_slice(&pem) {
        Ok(_) => Ok(pem),
        Err(error) => Err(unusable(key, path, &format!("holds no private key in PEM ({error})"))),
    }
}

/// Whether a key is that of the first certificate. One that cannot be compared may be: the client of a
/// bus uses another library, with other kinds of keys.
fn belongs(key: &[u8], chain: &[u8]) -> bool {
    let Ok(key) = PrivateKeyDer::from_pem_slice(key) else { return true };
    let chain = CertificateDer::pem_slice_iter(chain).filter_map(Result::ok).collect();
    let pair = CertifiedKey::from_der(chain, key, &rustls::crypto::ring::default_provider());
    !matches!(pair, Err(rustls::Error::InconsistentKeys(_)))
}

/// Reads a file with at least one certificate, unchanged.
fn certificates(key: &str, path: &Path) -> Result<Vec<u8>, Unusable> {
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

fn text(key: &str, path: &Path) -> Result<Vec<u8>, Unusable> {
    fs::read(path).map_err(|error| unusable(key, path, &format!("cannot be read ({error})")))
}

fn unusable(key: &str, path: &Path, problem: &str) -> Unusable {
    let problem = format!("names {}, which {problem}", path.display());
    Unusable { key: key.to_owned(), problem }
}

/// `own`, behind the system's trusted certificates.
fn with_system_roots(own: Vec<u8>) -> Vec<u8> {
    [system_roots(), own].concat()
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
