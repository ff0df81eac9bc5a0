// krew writes the krew manifest of a release of kubectl-gpu. It reads the release's archives
// (kubectl-gpu_VERSION_OS_ARCH.tar.gz) for their platforms and checksums.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/template"
)

func main() {
	var version, folder, address, manifest string
	flag.StringVar(&version, "version", "", "version of the release, such as v0.1.0")
	flag.StringVar(&folder, "release", "", "folder with the archives")
	flag.StringVar(&address, "url", "", "address below which users download the archives")
	flag.StringVar(&manifest, "template", "deployments/krew/gpu.yaml", "the manifest's template")
	flag.Parse()
	out, err := fill(manifest, version, folder, address)
	if err != nil {
		fmt.Fprintln(os.Stderr, "krew:", err)
		os.Exit(1)
	}
	if _, err := os.Stdout.Write(out); err != nil {
		os.Exit(1)
	}
}

// archive is the archive of one platform.
type archive struct{ OS, Arch, URI, SHA256, Program string }

var (
	semver = regexp.MustCompile(`^v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$`)
	named  = regexp.MustCompile(`^kubectl-gpu_(.+)_([a-z]+)_([a-z0-9]+)\.tar\.gz$`)
)

// fill returns the manifest for the archives in the folder.
func fill(manifest, version, folder, address string) ([]byte, error) {
	if !semver.MatchString(version) {
		return nil, fmt.Errorf("version %q is not of the form v0.1.0", version)
	}
	if !strings.HasPrefix(address, "https://") {
		return nil, fmt.Errorf("address %q does not start with https://", address)
	}
	files, err := filepath.Glob(filepath.Join(folder, "kubectl-gpu_*.tar.gz"))
	if err != nil {
		return nil, err
	}
	slices.Sort(files)
	var all []archive
	for _, file := range files {
		name := filepath.Base(file)
		parts := named.FindStringSubmatch(name)
		if parts == nil || parts[1] != version {
			return nil, fmt.Errorf("%s is no archive of %s: make the release again", file, version)
		}
		a := archive{OS: parts[2], Arch: parts[3], URI: strings.TrimSuffix(address, "/") + "/" + name, Program: "kubectl-gpu"}
		if a.OS == "windows" {
			a.Program += ".exe"
		}
		if a.SHA256, err = check(file, a.Program); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		all = append(all, a)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("there is no kubectl-gpu_%s_*.tar.gz in %q", version, folder)
	}
	t, err := template.ParseFiles(manifest)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = t.Execute(&out, struct {
		Version  string
		Archives []archive
	}{version, all})
	return out.Bytes(), err
}

// check returns the archive's checksum. The archive must have the program and the licence, which
// krew wants.
func check(file, program string) (string, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	zip, err := gzip.NewReader(bytes.NewReader(raw))
	if err != nil {
		return "", err
	}
	missing := []string{program, "LICENSE"}
	for files := tar.NewReader(zip); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return "", err
		}
		missing = slices.DeleteFunc(missing, func(name string) bool { return name == path.Clean(h.Name) })
	}
	if len(missing) > 0 {
		return "", fmt.Errorf("it lacks %s", strings.Join(missing, ", "))
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:]), nil
}
