package pki

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
)

func parse(t *testing.T, content []byte) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(content)
	if block == nil {
		t.Fatalf("no PEM block in %q", content)
	}
	certificate, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return certificate
}

func TestCertificatesVerifyOnlyForTheirUse(t *testing.T) {
	authority, err := NewAuthority("cluster")
	if err != nil {
		t.Fatal(err)
	}
	stranger, err := NewAuthority("stranger")
	if err != nil {
		t.Fatal(err)
	}
	server, err := authority.Server("kube-apiserver", []net.IP{net.IPv4(10, 0, 0, 2)}, []string{"kubernetes"})
	if err != nil {
		t.Fatal(err)
	}
	client, err := authority.Client("system:node:node1", "system:nodes")
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name        string
		certificate []byte
		authority   *Authority
		host        string
		usage       x509.ExtKeyUsage
		accepted    bool
	}{
		{"server by its address", server.Certificate, authority, "10.0.0.2", x509.ExtKeyUsageServerAuth, true},
		{"server by its name", server.Certificate, authority, "kubernetes", x509.ExtKeyUsageServerAuth, true},
		{"server by another name", server.Certificate, authority, "elsewhere", x509.ExtKeyUsageServerAuth, false},
		{"server as a client", server.Certificate, authority, "", x509.ExtKeyUsageClientAuth, false},
		{"client as a client", client.Certificate, authority, "", x509.ExtKeyUsageClientAuth, true},
		{"client as a server", client.Certificate, authority, "", x509.ExtKeyUsageServerAuth, false},
		{"client of another cluster", client.Certificate, stranger, "", x509.ExtKeyUsageClientAuth, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			roots := x509.NewCertPool()
			roots.AppendCertsFromPEM(test.authority.Certificate())
			_, err := parse(
				t,
				test.certificate,
			).Verify(x509.VerifyOptions{Roots: roots, DNSName: test.host, KeyUsages: []x509.ExtKeyUsage{test.usage}})
			if (err == nil) != test.accepted {
				t.Errorf("verification says %v, want accepted=%v", err, test.accepted)
			}
		})
	}
	if subject := parse(t, client.Certificate).Subject; subject.CommonName != "system:node:node1" || len(subject.Organization) != 1 ||
		subject.Organization[0] != "system:nodes" {
		t.Errorf("client subject is %v, so Kubernetes would see another user", subject)
	}
}

func TestKubeconfigHasUsableKeyPair(t *testing.T) {
	authority, err := NewAuthority("cluster")
	if err != nil {
		t.Fatal(err)
	}
	client, err := authority.Client("admin", "system:masters")
	if err != nil {
		t.Fatal(err)
	}
	content, err := authority.Kubeconfig("https://10.0.0.2:443", "demo", client)
	if err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(content)
	if err != nil {
		t.Fatal(err)
	}
	if config.Host != "https://10.0.0.2:443" {
		t.Errorf("kubeconfig points to %s", config.Host)
	}
	if _, err := tls.X509KeyPair(config.CertData, config.KeyData); err != nil {
		t.Errorf("embedded key pair: %v", err)
	}
}
