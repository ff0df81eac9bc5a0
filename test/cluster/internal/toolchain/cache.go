// Package toolchain builds a test cluster's programs and keeps them in a cache outside the
// checkout.
//
// Every result is an artifact: a directory named after its content and a key over all inputs
// (module files, sources, flags, Go version). An artifact is built in a temporary directory and
// renamed. So an existing directory is complete, a changed input builds again, and an interrupted
// build leaves nothing that looks finished. A lock per artifact prevents duplicate builds.
//
// It deletes no older artifacts and installs nothing on the machine: Debian packages are unpacked
// inside the cache.
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

// Cache is a folder of artifacts: directories of built files.
type Cache struct {
	// Dir is the absolute path of the cache. It may be deleted whenever no build or cluster uses it.
	Dir string
}

// DefaultCache is the user's cache: $XDG_CACHE_HOME/gpu-dra-driver/cluster, or the same below
// ~/.cache.
func DefaultCache() (*Cache, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("find the folder for the cluster's build cache: %w (set XDG_CACHE_HOME or HOME)", err)
	}
	return &Cache{Dir: filepath.Join(base, "gpu-dra-driver", "cluster")}, nil
}

// Key returns a digest over parts, which are the inputs of an artifact. Two keys are equal only if
// all parts and their order are equal.
func Key(parts ...string) string {
	sum := sha256.New()
	for _, part := range parts {
		fmt.Fprintf(sum, "%d\n%s\n", len(part), part)
	}
	return hex.EncodeToString(sum.Sum(nil))[:16]
}

// Lookup returns the directory of the artifact with this name and key. built says whether the
// artifact is there already.
func (c *Cache) Lookup(name, key string) (dir string, built bool) {
	dir = filepath.Join(c.Dir, name+"-"+key)
	info, err := os.Stat(dir)
	return dir, err == nil && info.IsDir()
}

// Ensure returns the artifact's directory. If the artifact is missing, Ensure calls build to fill
// the directory. Concurrent calls, also of other processes, build once. The directory appears under
// the artifact's name only if build returns nil.
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

// lock makes builds of the same artifact wait for each other, also in other processes. It removes
// what an interrupted build left.
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
