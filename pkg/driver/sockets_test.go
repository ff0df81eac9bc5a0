package driver

import (
	"net"
	"os"
	"path/filepath"
	"testing"
)

func TestOnlyStaleSocketsAreRemoved(t *testing.T) {
	plugin, registrar := t.TempDir(), t.TempDir()
	stale := []string{filepath.Join(plugin, "dra-1.sock"), filepath.Join(registrar, DriverName+"-1-reg.sock")}
	kept := []string{
		filepath.Join(plugin, "dra-2.sock"), filepath.Join(registrar, DriverName+"-2-reg.sock"),
		filepath.Join(registrar, "other.example.com-reg.sock")}
	for _, path := range append(append([]string(nil), stale...), kept[2]) {
		createStaleSocket(t, path)
	}
	for _, path := range kept[:2] {
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
	}
	if err := removeStaleSockets(t.Context(), plugin, registrar); err != nil {
		t.Fatal(err)
	}
	for _, path := range stale {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s is still there (%v)", path, err)
		}
	}
	for _, path := range kept {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("%s is gone: %v", path, err)
		}
	}
}

// createStaleSocket creates a socket file on which no process listens, as a killed process leaves
// it.
func createStaleSocket(t *testing.T, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}
