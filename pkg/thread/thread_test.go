package thread

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestMainThreadKeepsItsNamespace calls OnSpare often enough that Go picks the main thread for it,
// too.
func TestMainThreadKeepsItsNamespace(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to make a mount namespace")
	}
	namespace := func(of string) string {
		t.Helper()
		name, err := os.Readlink(of + "/ns/mnt")
		if err != nil {
			t.Fatal(err)
		}
		return name
	}
	before := namespace("/proc/self")
	for i := range 500 {
		var err error
		var inside string
		OnSpare(func() {
			err = unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS)
			inside = namespace("/proc/thread-self")
		})
		if err != nil || inside == before {
			t.Fatalf("the thread moved to namespace %s: %v", inside, err)
		}
		if now := namespace("/proc/self"); now != before {
			t.Fatalf("after %d times the main thread is in another mount namespace: %s, and was in %s", i+1, now, before)
		}
	}
}
