package e2e

import (
	"regexp"
	"slices"
	"testing"
)

var uuidForm = regexp.MustCompile(`GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)

// visible returns the UUIDs of the GPUs that nvidia-smi lists in a container, sorted.
func (w *world) visible(t *testing.T, namespace, pod, container string) []string {
	t.Helper()
	seen := uuidForm.FindAllString(w.mustExec(t, namespace, pod, container, "nvidia-smi", "-L"), -1)
	slices.Sort(seen)
	return seen
}
