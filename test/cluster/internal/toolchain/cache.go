// Package toolchain builds what a test cluster runs and keeps it in a cache outside the checkout.
//
// Everything it makes is an artifact: a directory named after what it holds and after a key over all inputs that decide its content
// (module files, sources, flags, Go version). An artifact is built beside and renamed into place, so that a directory that exists is
// complete, a changed input builds anew, and a build that was cut off leaves nothing that looks finished. A lock per artifact makes two
// builds at once build it once.
//
// It does not delete older artifacts and does not install anything on the machine: Debian packages are unpacked inside the cache.
package toolchain

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"

	"github.com/gofrs/flock"
)

// Cache is a folder of artifacts.
type Cache struct {
	// Dir is the absolute path of the cache. It may be deleted whenever no build or cluster uses it.
	Dir string
}

// DefaultCache is the cache of the user: $XDG_CACHE_HOME/gpu-dra-driver/cluster, or the same below ~/.cache.
func DefaultCache() (*Cache, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("find the folder for the cluster's build cache: %w (set XDG_CACHE_HOME or HOME)", err)
	}
	return &Cache{Dir: filepath.Join(base, "gpu-dra-driver", "cluster")}, nil
}

// Key identifies the inputs of an artifact. Two keys are equal only if every part and the order of the parts are equal.
func Key(parts ...string) string {
	sum := sha256.New()
	for _, part := range parts {
		fmt.Fprintf(sum, "%d\n%s\n", len(part), part)
	}
	return hex.EncodeToString(sum.Sum(nil))[:16]
}

// Lookup returns the artifact's directory and whether it has been built.
func (c *Cache) Lookup(name, key string) (dir string, built bool) {
	dir = filepath.Join(c.Dir, name+"-"+key)
	info, err := os.Stat(dir)
	return dir, err == nil && info.IsDir()
}

// Ensure returns the artifact's directory, and calls build to fill it if it is not there. Concurrent calls, of other processes too, build
// once. What build leaves in its directory appears under the artifact's name only if it returns nil.
func (c *Cache) Ensure(ctx context.Context, name, key string, build func(dir string) error) (string, error) {
	final, built := c.Lookup(name, key)
	if built {
		return final, nil
	}
	unlock, err := c.lock(ctx, name)
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, built := c.Lookup(name, key); built {
		return final, nil
	}
	partial, err := os.MkdirTemp(c.Dir, ".partial-"+name+"-")
	if err != nil {
		return "", fmt.Errorf("create a folder for %s: %w", name, err)
	}
	defer func() { _ = os.RemoveAll(partial) }()
	if err := os.Chmod(partial, 0o755); err != nil {
		return "", err
	}
	if err := build(partial); err != nil {
		return "", fmt.Errorf("build %s: %w", name, err)
	}
	if err := os.Rename(partial, final); err != nil {
		return "", fmt.Errorf("put %s into the cache: %w", name, err)
	}
	return final, nil
}

// lock serialises the builds of one artifact and clears what an interrupted one left.
func (c *Cache) lock(ctx context.Context, name string) (unlock func(), err error) {
	if err := os.MkdirAll(c.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("create the cluster's build cache: %w", err)
	}
	lock := flock.New(filepath.Join(c.Dir, "."+name+".lock"))
	if _, err := lock.TryLockContext(ctx, lockPoll); err != nil {
		return nil, fmt.Errorf("wait for another build of %s: %w", name, err)
	}
	leftovers, err := filepath.Glob(filepath.Join(c.Dir, ".partial-"+name+"-*"))
	if err != nil {
		_ = lock.Unlock()
		return nil, err
	}
	for _, leftover := range leftovers {
		if err := os.RemoveAll(leftover); err != nil {
			_ = lock.Unlock()
			return nil, fmt.Errorf("remove an interrupted build of %s: %w", name, err)
		}
	}
	return func() { _ = lock.Unlock() }, nil
}
