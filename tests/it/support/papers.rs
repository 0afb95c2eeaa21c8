//! A certificate authority, and a certificate of this machine that it signed.

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use tempfile::TempDir;

/// The files `ca`, `cert` and `key`, as PEM. The certificate is good for servers and for clients.
#[derive(Debug)]
pub(crate) struct Papers {
    directory: TempDir,
}

impl Papers {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        authority.distinguished_name.push(DnType::CommonName, "the authority of a test");
        let key = KeyPair::generate().unwrap();
        let papers = Self { directory };
        std::fs::write(papers.path("ca"), authority.self_signed(&key).unwrap().pem()).unwrap();
        let authority = Issuer::new(authority, key);
        let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        let key = KeyPair::generate().unwrap();
        let own = CertificateParams::new(names).unwrap().signed_by(&key, &authority).unwrap();
        std::fs::write(papers.path("cert"), own.pem()).unwrap();
        std::fs::write(papers.path("key"), key.serialize_pem()).unwrap();
        papers
    }

    /// The path of `ca`, `cert` or `key`.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(format!("{name}.pem"))
    }

    /// A setting that names one of the files.
    pub(crate) fn file(&self, name: &str) -> String {
        format!("\"{}\"", self.path(name).display())
    }
}
