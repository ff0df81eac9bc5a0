// Package smi fetches the real nvidia-smi from Debian's non-free component into the user's cache, and others of the vendor's programs that run without a GPU.
//
// They are not free software: each is downloaded at test time and never becomes part of the project. The mirror is the one
// that this system's apt is configured with; apt is run with folders of its own, so that the system's sources and lists stay
// as they are. Where it cannot be had the error is ErrUnavailable, and tests that need it say so.
package smi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// ErrUnavailable says that this machine cannot get nvidia-smi: no Debian apt, no mirror, no network.
var ErrUnavailable = errors.New("nvidia-smi cannot be had here")

// DefaultSuite is the Debian release whose nvidia-smi is taken: version 550.
const DefaultSuite = "trixie"

// CacheDir is where fetched copies are kept, one folder for each suite.
func CacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache folder: %w", err)
	}
	return filepath.Join(cache, "gpu-dra-driver", "nvidia-smi"), nil
}

// Fetch gives the path of nvidia-smi from the suite, downloading it where the cache has none.
func Fetch(ctx context.Context, suite string) (string, error) {
	return FetchProgram(ctx, suite, "nvidia-smi", "nvidia-smi")
}

// FetchProgram gives the path of a program of one of the suite's non-free packages in the same way.
func FetchProgram(ctx context.Context, suite, from, program string) (string, error) {
	cache, err := CacheDir()
	if err != nil {
		return "", err
	}
	target := filepath.Join(cache, suite, program)
	if info, err := os.Stat(target); err == nil && info.Size() > 0 {
		return target, nil
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(cache, "fetch-")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(work) }()
	if err := download(ctx, work, suite, from); err != nil {
		return "", fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	packages, err := filepath.Glob(filepath.Join(work, from+"_*.deb"))
	if err != nil || len(packages) != 1 {
		return "", fmt.Errorf("%w: apt-get download left %d packages", ErrUnavailable, len(packages))
	}
	unpacked := filepath.Join(work, "unpacked")
	if _, err := run(ctx, work, "dpkg-deb", "--extract", packages[0], unpacked); err != nil {
		return "", err
	}
	binary, err := findBinary(unpacked, program)
	if err != nil {
		return "", err
	}
	if err := os.Chmod(binary, 0o755); err != nil {
		return "", err
	}
	// By rename: two that fetch at once both end with a whole file.
	return target, os.Rename(binary, target)
}

// archiveKeyring holds Debian's keys, of the package debian-archive-keyring. Where it is not there, apt's own trusted keys serve.
const archiveKeyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// findMirror gives where the system's apt gets Debian's main component from.
func findMirror(ctx context.Context) (string, error) {
	out, err := run(ctx, "", "apt-get", "indextargets", "--format", "$(REPO_URI)|$(COMPONENT)", "Created-By: Packages")
	if err != nil {
		return "", err
	}
	for line := range strings.SplitSeq(out, "\n") {
		uri, component, _ := strings.Cut(line, "|")
		if component == "main" && strings.HasSuffix(strings.TrimSuffix(uri, "/"), "/debian") {
			return uri, nil
		}
	}
	return "", errors.New("no Debian archive among the sources of this system's apt")
}

func download(ctx context.Context, work, suite, name string) error {
	from, err := findMirror(ctx)
	if err != nil {
		return err
	}
	options := ""
	if _, err := os.Stat(archiveKeyring); err == nil {
		options = "[signed-by=" + archiveKeyring + "] "
	}
	source := fmt.Sprintf("deb %s%s %s non-free\n", options, from, suite)
	list := filepath.Join(work, "sources.list")
	if err := os.WriteFile(list, []byte(source), 0o644); err != nil {
		return err
	}
	for _, folder := range []string{"lists/partial", "cache/archives/partial", "parts"} {
		if err := os.MkdirAll(filepath.Join(work, folder), 0o755); err != nil {
			return err
		}
	}
	apart := []string{
		"-o", "Dir::Etc::sourcelist=" + list,
		"-o", "Dir::Etc::sourceparts=" + filepath.Join(work, "parts"),
		"-o", "Dir::State::lists=" + filepath.Join(work, "lists"),
		"-o", "Dir::Cache=" + filepath.Join(work, "cache"),
		"-o", "APT::Sandbox::User=root", // the folder is ours alone: apt's own user could not write into it
		"-o", "Acquire::Languages=none",
		"-o", "Acquire::Retries=3",
	}
	if _, err := run(ctx, work, "apt-get", append(apart, "--error-on=any", "update")...); err != nil {
		return err
	}
	_, err = run(ctx, work, "apt-get", append(apart, "download", name)...)
	return err
}

// findBinary finds the program: its folder differs between releases, and a link of the same name may stand beside it.
func findBinary(folder, program string) (string, error) {
	var found string
	err := filepath.WalkDir(folder, func(path string, entry os.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() || entry.Name() != program {
			return err
		}
		head := make([]byte, 4)
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		_, err = file.Read(head)
		if bytes.Equal(head, []byte("\x7fELF")) {
			found = path
			err = nil
		}
		return errors.Join(err, file.Close())
	})
	if err == nil && found == "" {
		err = fmt.Errorf("the package holds no program %s", program)
	}
	return found, err
}

func run(ctx context.Context, dir, name string, args ...string) (string, error) {
	command := exec.CommandContext(ctx, name, args...)
	command.Dir = dir
	command.Env = append(os.Environ(), "LC_ALL=C")
	var out, complaint bytes.Buffer
	command.Stdout, command.Stderr = &out, &complaint
	if err := command.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(complaint.String()))
	}
	return out.String(), nil
}
