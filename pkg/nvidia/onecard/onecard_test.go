package onecard

import (
	"os"
	"testing"
)

// TestMainThreadKeepsItsNamespace hides a device node often enough that Go picks the main thread
// for it, too. Programs that enter the process's namespaces, as `kubectl exec` does, get those of
// the main thread.
func TestMainThreadKeepsItsNamespace(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to make a mount namespace")
	}
	namespace := func() string {
		t.Helper()
		name, err := os.Readlink("/proc/self/ns/mnt")
		if err != nil {
			t.Fatal(err)
		}
		return name
	}
	before := namespace()
	for i := range 500 {
		Hide([]string{"/dev/null"}, func() {})
		if now := namespace(); now != before {
			t.Fatalf("after %d times the main thread is in another mount namespace: %s, and was in %s", i+1, now, before)
		}
	}
}
