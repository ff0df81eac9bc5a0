package cdi

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"

	"tags.cncf.io/container-device-interface/specs-go"
)

// A look that is under way may have passed what is missing by now: it is not that of who asks later.
func TestLooksAtTheSameEditsAreShared(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "libcuda.so")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	edits := specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: path, ContainerPath: path}}}
	synctest.Test(t, func(t *testing.T) {
		step, looks := make(chan struct{}), 0
		v := &Verifier{Visible: func(host string) string {
			looks++
			<-step
			return host
		}}
		errs := make([]error, 4)
		var all sync.WaitGroup
		call := func(i int, edits specs.ContainerEdits) {
			all.Go(func() { errs[i] = v.Verify(edits) })
			synctest.Wait()
		}
		call(0, edits)
		call(1, edits)
		call(2, edits)
		if looks != 1 {
			t.Fatalf("%d looks at once", looks)
		}
		step <- struct{}{}
		synctest.Wait()
		// Others are not waited for, even if they say the same.
		call(3, specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: path, ContainerPath: path}}})
		if looks != 3 {
			t.Fatalf("%d looks, want the first, that of the next two, and that at other edits", looks)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		step <- struct{}{}
		step <- struct{}{}
		all.Wait()
		if looks != 3 || errs[0] != nil || errs[1] == nil || errs[2] == nil || errs[3] == nil {
			t.Errorf("%d looks: %v", looks, errs)
		}
	})
}
