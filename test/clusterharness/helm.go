package clusterharness

import (
	"os"
	"os/exec"
	"path/filepath"
)

// FindHelm returns the path of a helm program from $HELM, from PATH, or from the test cluster's
// cache. It returns false if there is none.
func FindHelm() (string, bool) {
	if named := os.Getenv("HELM"); named != "" {
		return named, true
	}
	if path, err := exec.LookPath("helm"); err == nil {
		return path, true
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", false
	}
	found, err := filepath.Glob(filepath.Join(cache, "gpu-dra-driver", "cluster", "helm-*", "helm"))
	if err != nil || len(found) == 0 {
		return "", false
	}
	return found[len(found)-1], true
}
