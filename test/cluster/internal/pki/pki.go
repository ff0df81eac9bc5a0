// Package pki creates the certificates, keys and kubeconfigs of one cluster in memory. They fit
// together and are valid for the life of a test cluster. The package neither rotates nor revokes
// them, and writes nothing to disk.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"time"
)

// lifetime is how long certificates are valid, longer than any test cluster exists. Certificates
// are valid from clockSkew before their creation, in case a clock was set back.
const (
	lifetime  = 365 * 24 * time.Hour
	clockSkew = time.Hour
)

// Pair is a certificate and its private key, both in PEM.
type Pair struct {
	Certificate, Key []byte
}

// Authority is a certificate authority that issues the cluster's certificates.
type Authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	pem         []byte
}

// NewAuthority makes a self-signed authority.
func NewAuthority(commonName string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("create the key of authority %s: %w", commonName, err)
	}
	template, err := template(pkix.Name{CommonName: commonName})
	if err != nil {
		return nil, err
	}
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("sign authority %s: %w", commonName, err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &Authority{certificate: certificate, key: key, pem: encodeCertificate(der)}, nil
}

// Certificate returns the authority's own certificate in PEM.
func (a *Authority) Certificate() []byte { return a.pem }

// Client issues a client certificate for a Kubernetes user with the given groups.
func (a *Authority) Client(user string, groups ...string) (Pair, error) {
	return a.issue(pkix.Name{CommonName: user, Organization: groups}, x509.ExtKeyUsageClientAuth, nil, nil)
}

// Server issues a certificate for a server that clients reach under the given addresses and names.
func (a *Authority) Server(commonName string, addresses []net.IP, names []string) (Pair, error) {
	return a.issue(pkix.Name{CommonName: commonName}, x509.ExtKeyUsageServerAuth, addresses, names)
}

func (a *Authority) issue(subject pkix.Name, usage x509.ExtKeyUsage, addresses []net.IP, names []string) (Pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Pair{}, fmt.Errorf("create the key of %s: %w", subject.CommonName, err)
	}
	template, err := template(subject)
	if err != nil {
		return Pair{}, err
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{usage}
	template.IPAddresses, template.DNSNames = addresses, names
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		return Pair{}, fmt.Errorf("sign the certificate of %s: %w", subject.CommonName, err)
	}
	encodedKey, err := encodeKey(key)
	if err != nil {
		return Pair{}, err
	}
	return Pair{Certificate: encodeCertificate(der), Key: encodedKey}, nil
}

// NewSigner creates the key pair that signs ServiceAccount tokens. Both keys are PEM.
func NewSigner() (private, public []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("create the ServiceAccount signing key: %w", err)
	}
	if private, err = encodeKey(key); err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, nil, err
	}
	return private, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), nil
}

func template(subject pkix.Name) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 126))
	if err != nil {
		return nil, fmt.Errorf("create a serial number for %s: %w", subject.CommonName, err)
	}
	now := time.Now()
	return &x509.Certificate{SerialNumber: serial, Subject: subject, NotBefore: now.Add(-clockSkew), NotAfter: now.Add(lifetime)}, nil
}

func encodeCertificate(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}
