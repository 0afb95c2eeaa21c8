//! TLS to NATS.

use std::path::Path;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use super::settings::NatsSettings;

/// What TLS trusts and shows, read from the files, so that renewed certificates are used. `None`: the
/// client's own default, if the server asks for TLS.
pub(super) async fn config(
    settings: &NatsSettings,
    is_required: bool,
) -> Result<Option<ClientConfig>, String> {
    // Fails if the provider is already installed, by this or another library of the process.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (ca, cert, key) =
        (settings.ca_file.clone(), settings.cert_file.clone(), settings.key_file.clone());
    if !is_required && ca.is_none() && cert.is_none() {
        return Ok(None);
    }
    let read = move || read(ca.as_deref(), cert.as_deref().zip(key.as_deref()));
    tokio::task::spawn_blocking(read).await.map_err(|error| error.to_string())?.map(Some)
}

fn read(ca: Option<&Path>, client: Option<(&Path, &Path)>) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    // Unusable certificates of the system are left out.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(path) = ca {
        for certificate in certificates(path)? {
            roots.add(certificate).map_err(|error| unusable(path, error))?;
        }
    }
    let builder = ClientConfig::builder().with_root_certificates(roots);
    let Some((cert, key_path)) = client else { return Ok(builder.with_no_client_auth()) };
    let key = PrivateKeyDer::from_pem_file(key_path).map_err(|error| unusable(key_path, error))?;
    builder.with_client_auth_cert(certificates(cert)?, key).map_err(|error| unusable(cert, error))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let all = CertificateDer::pem_file_iter(path).map_err(|error| unusable(path, error))?;
    all.collect::<Result<_, _>>().map_err(|error| unusable(path, error))
}

fn unusable(path: &Path, error: impl std::fmt::Display) -> String {
    format!("the file {} cannot be used: {error}", path.display())
}
