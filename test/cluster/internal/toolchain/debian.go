package toolchain

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// unpackDebian returns a folder with the unpacked Debian packages, and with those of their
// dependencies that the host lacks. It installs nothing: the host's package database stays
// unchanged.
func (c *Cache) unpackDebian(ctx context.Context, progress *Progress, packages ...string) (string, error) {
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "", fmt.Errorf("find out the Debian release: %w", err)
	}
	name := "debian-" + packages[0]
	return c.Ensure(ctx, name, Key(append(packages, string(release))...), func(dir string) error {
		progress.Printf("fetching Debian packages: %s", strings.Join(packages, " "))
		archives := filepath.Join(dir, ".archives")
		if err := os.MkdirAll(filepath.Join(archives, "partial"), 0o755); err != nil {
			return err
		}
		if err := downloadDebian(ctx, archives, packages); err != nil {
			return err
		}
		debs, err := filepath.Glob(filepath.Join(archives, "*.deb"))
		if err != nil || len(debs) == 0 {
			return fmt.Errorf(
				"apt-get downloaded nothing for %s: they are installed already, or the folder %s is not writable (%w)",
				strings.Join(packages, " "),
				archives,
				err,
			)
		}
		for _, deb := range debs {
			if out, err := exec.CommandContext(ctx, "dpkg-deb", "-x", deb, dir).CombinedOutput(); err != nil {
				return fmt.Errorf("unpack %s: %w: %s", filepath.Base(deb), err, out)
			}
		}
		return os.RemoveAll(archives)
	})
}

// downloadDebian downloads the packages with the package lists that the host has. If that fails, it
// refreshes the lists and tries again.
func downloadDebian(ctx context.Context, archives string, packages []string) error {
	download := func() error {
		args := append([]string{"install", "--reinstall", "--download-only", "--no-install-recommends", "-y", "-q",
			"-o", "Dir::Cache::archives=" + archives, "-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=true"}, packages...)
		return aptGet(ctx, args...)
	}
	if download() == nil {
		return nil
	}
	if err := aptGet(ctx, "update", "-q"); err != nil {
		return err
	}
	return download()
}

func aptGet(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}
