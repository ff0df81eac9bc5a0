package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// secretToken is the service account token in the test's kubeconfig. It must never be in a log.
const secretToken = "eyJhbGciOiJSUzI1NiJ9.c2VjcmV0LW9mLXRoZS1wbHVnaW4.c2lnbmF0dXJl"

// The plugin's log must not contain the token, even with verbosity 10: at its start the plugin logs
// each setting, and from verbosity 7 on client-go logs request headers.
func TestTokensAreNeverLogged(t *testing.T) {
	root := t.TempDir()
	pciDevice(t, root, "0000:1b:00.0", "0x10de", "0x030200")
	asked := make(chan struct{})
	var once sync.Once
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "Bearer "+secretToken {
			once.Do(func() { close(asked) })
		}
		http.Error(w, "not now", http.StatusServiceUnavailable)
	}))
	defer server.Close()
	kubeconfig := filepath.Join(root, "kubeconfig")
	content := `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}],
clusters: [{name: c, cluster: {server: "` + server.URL + `", insecure-skip-tls-verify: true}}],
users: [{name: u, user: {token: "` + secretToken + `"}}]}`
	registry := filepath.Join(root, "plugins_registry")
	if err := os.WriteFile(kubeconfig, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(registry, 0o750); err != nil {
		t.Fatal(err)
	}
	child := exec.CommandContext(t.Context(), os.Args[0],
		"--v=10", "--kubeconfig="+kubeconfig, "--node-name=n", "--http-address=127.0.0.1:0", "--sysfs-root="+filepath.Join(root, "sys"),
		"--driver-root="+filepath.Join(root, "driver"),
		"--plugin-dir="+filepath.Join(root, "plugin"), "--cdi-root="+filepath.Join(root, "cdi"), "--registrar-dir="+registry)
	child.Env = append(os.Environ(), asPlugin+"=1")
	var log bytes.Buffer
	child.Stdout, child.Stderr = &log, &log
	child.WaitDelay = 5 * time.Second
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-asked:
	case <-time.After(time.Minute):
		t.Error("the plugin has not asked the API server")
	}
	_ = child.Process.Signal(os.Interrupt)
	_ = child.Wait() // Other tests check the exit code.
	said := log.String()
	if !strings.Contains(said, "<masked>") {
		t.Errorf("the log has no request headers, so the test proves nothing:\n%s", said)
	}
	for _, part := range append(strings.Split(secretToken, "."), secretToken) {
		if strings.Contains(said, part) {
			t.Errorf("%s is in the log:\n%s", part, said)
		}
	}
}
