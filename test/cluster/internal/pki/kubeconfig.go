package pki

import (
	"fmt"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Kubeconfig renders a kubeconfig for the user of the certificate client. server is the API
// server's URL, and cluster is the name of the cluster's entry. Certificates and key are embedded.
func (a *Authority) Kubeconfig(server, cluster string, client Pair) ([]byte, error) {
	config := clientcmdapi.NewConfig()
	config.Clusters[cluster] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: a.pem}
	config.AuthInfos[cluster] = &clientcmdapi.AuthInfo{ClientCertificateData: client.Certificate, ClientKeyData: client.Key}
	config.Contexts[cluster] = &clientcmdapi.Context{Cluster: cluster, AuthInfo: cluster}
	config.CurrentContext = cluster
	content, err := clientcmd.Write(*config)
	if err != nil {
		return nil, fmt.Errorf("render the kubeconfig for %s: %w", server, err)
	}
	return content, nil
}
