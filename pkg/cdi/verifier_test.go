package cdi

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"

	"tags.cncf.io/container-device-interface/specs-go"
)

// The test expects that a call never shares a check that began before the call: that check may
// already have passed a file that vanished since.
func TestConcurrentVerifyCallsShareChecks(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "libcuda.so")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	edits := specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: path, ContainerPath: path}}}
	synctest.Test(t, func(t *testing.T) {
		step, checks := make(chan struct{}), 0
		v := &Verifier{Visible: func(host string) string {
			checks++
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
		if checks != 1 {
			t.Fatalf("%d concurrent checks", checks)
		}
		step <- struct{}{}
		synctest.Wait()
		// A call with other edits starts its own check, even if their content is equal.
		call(3, specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: path, ContainerPath: path}}})
		if checks != 3 {
			t.Fatalf("%d checks, want three: the first, one for the next two, and one for other edits", checks)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		step <- struct{}{}
		step <- struct{}{}
		all.Wait()
		if checks != 3 || errs[0] != nil || errs[1] == nil || errs[2] == nil || errs[3] == nil {
			t.Errorf("%d checks: %v", checks, errs)
		}
	})
}
