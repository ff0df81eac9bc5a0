// Package smi downloads the real nvidia-smi, and other NVIDIA programs that run without a GPU, from
// Debian's non-free component into the user's cache.
//
// These programs are not free software, so the project does not contain them, and tests download
// them. The package uses the mirror that this system's apt uses. It runs apt with folders of its
// own, which leaves the system's sources and lists unchanged. Without apt or a mirror the functions
// return ErrUnavailable, and tests that need the programs are skipped.
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

// ErrUnavailable means that this machine cannot get nvidia-smi: no Debian apt, no mirror, no
// network.
var ErrUnavailable = errors.New("nvidia-smi is not available on this machine")

// DefaultSuite is the Debian release from which nvidia-smi is downloaded. It has version 550.
const DefaultSuite = "trixie"

// CacheDir returns the folder for downloaded programs. It has one subfolder for each Debian
// release.
func CacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache folder: %w", err)
	}
	return filepath.Join(cache, "gpu-dra-driver", "nvidia-smi"), nil
}

// Fetch returns the path of nvidia-smi from the Debian release suite. It downloads nvidia-smi if
// the cache does not have it.
func Fetch(ctx context.Context, suite string) (string, error) {
	return FetchProgram(ctx, suite, "nvidia-smi", "nvidia-smi")
}

// FetchProgram returns the path of a program of the Debian release suite. If the cache does not
// have the program, FetchProgram downloads it from the Debian package "from".
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
	// A rename is atomic, so two processes that download at the same time both end up with a complete
	// file.
	return target, os.Rename(binary, target)
}

// archiveKeyring is the file of Debian's keys, from the package debian-archive-keyring. If it is
// missing, apt uses its own trusted keys.
const archiveKeyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// findMirror returns the URL from which the system's apt gets Debian's main component.
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
		"-o", "APT::Sandbox::User=root", // apt's own user cannot write into this user's folder
		"-o", "Acquire::Languages=none",
		"-o", "Acquire::Retries=3",
	}
	if _, err := run(ctx, work, "apt-get", append(apart, "--error-on=any", "update")...); err != nil {
		return err
	}
	_, err = run(ctx, work, "apt-get", append(apart, "download", name)...)
	return err
}

// findBinary returns the path of the program in an unpacked package. The folder of the program
// differs between releases, and a link of the same name may exist too.
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
