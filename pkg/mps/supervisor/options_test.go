package supervisor

import (
	"path/filepath"
	"testing"
)

// A daemon needs a /dev of its own only if the driver's device nodes are elsewhere. On a plain host
// the driver root is the host's /, so its dev is the host's /dev at another path.
func TestPlainHostNeedsNoOwnDev(t *testing.T) {
	container := t.TempDir()
	for root, want := range map[string]string{
		"/": "", "/dev": "", "/proc/self/root": "", "/proc/self/root/dev": "", container: filepath.Join(container, "dev"),
	} {
		o := Options{DevRoot: root, DriverRootMount: "/"}
		if got := o.dev(); got != want {
			t.Errorf("with the dev root %s the daemon gets %q, want %q", root, got, want)
		}
	}
}
