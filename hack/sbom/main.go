// Sbom writes a CycloneDX list of the modules linked into each program, with versions, hashes and
// licences. It reads the build information in the program and the modules' licence files. The list
// has no time and no serial number, so that the same program gives the same list. A module whose
// licence is unknown or not permitted is an error.
//
// Sbom is a separate Go module, so that its dependencies do not affect the driver's.
//
//	sbom -out FOLDER PROGRAM...
package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"

	"github.com/CycloneDX/cyclonedx-go"
)

func main() {
	out := flag.String("out", ".", "folder for the lists, PROGRAM.cdx.json")
	flag.Parse()
	if err := run(*out, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func run(out string, programs []string) error {
	cache, err := moduleCache()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	var errs []error
	for _, program := range programs {
		bom, err := list(program, cache)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", program, err))
			continue
		}
		path := filepath.Join(out, filepath.Base(program)+".cdx.json")
		if err := write(path, bom); err != nil {
			return err
		}
		fmt.Printf("%s: %d modules, %s\n", path, len(*bom.Components)-1, strings.Join(licencesOf(bom), ", "))
	}
	return errors.Join(errs...)
}

func moduleCache() (string, error) {
	dir, err := exec.Command("go", "env", "GOMODCACHE").Output()
	if err != nil {
		return "", fmt.Errorf("find the module cache: %w", err)
	}
	return strings.TrimSpace(string(dir)), nil
}

// list returns the CycloneDX document for a program, with a component for each module that is
// linked into it. cache is Go's module cache.
func list(program, cache string) (*cyclonedx.BOM, error) {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return nil, err
	}
	content, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(content)
	self := component(cyclonedx.ComponentTypeApplication, info.Main)
	self.Name = info.Path
	self.Hashes = &[]cyclonedx.Hash{{Algorithm: cyclonedx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}}
	self.Properties = settings(info)

	std := component(cyclonedx.ComponentTypeLibrary, debug.Module{Path: "std",
		Version: strings.TrimPrefix(strings.Fields(info.GoVersion)[0], "go")})
	std.Licenses = choices([]string{"BSD-3-Clause"}) // https://go.dev/LICENSE
	components := []cyclonedx.Component{std}
	var errs []error
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		c := component(cyclonedx.ComponentTypeLibrary, *m)
		if c.Hashes, err = hashes(m.Sum); err != nil {
			errs = append(errs, fmt.Errorf("%s@%s: %w", m.Path, m.Version, err))
			continue
		}
		ids, err := licences(cache, m.Path, m.Version)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s@%s: %w", m.Path, m.Version, err))
			continue
		}
		c.Licenses = choices(ids)
		components = append(components, c)
	}
	var refs []string
	for _, c := range components {
		refs = append(refs, c.BOMRef)
	}
	bom := cyclonedx.NewBOM()
	bom.Metadata = &cyclonedx.Metadata{Component: &self}
	bom.Components = &components
	bom.Dependencies = &[]cyclonedx.Dependency{{Ref: self.BOMRef, Dependencies: &refs}}
	return bom, errors.Join(errs...)
}

// component returns the CycloneDX component of module m. It identifies the module by its package
// URL (https://github.com/package-url/purl-spec).
func component(kind cyclonedx.ComponentType, m debug.Module) cyclonedx.Component {
	purl := "pkg:golang/" + m.Path
	if m.Version != "" {
		purl += "@" + strings.ReplaceAll(m.Version, "+", "%2B")
	}
	return cyclonedx.Component{BOMRef: purl, Type: kind, Name: m.Path, Version: m.Version, PackageURL: purl}
}

// hashes converts a module's hash from the format of go.sum to that of CycloneDX. The hash is a
// SHA-256 over the hashes of the module's files.
func hashes(sum string) (*[]cyclonedx.Hash, error) {
	encoded, ok := strings.CutPrefix(sum, "h1:")
	raw, err := base64.StdEncoding.DecodeString(encoded)
	if !ok || err != nil || len(raw) != sha256.Size {
		return nil, fmt.Errorf("its hash %q does not have the form of go.sum", sum)
	}
	return &[]cyclonedx.Hash{{Algorithm: cyclonedx.HashAlgoSHA256, Value: hex.EncodeToString(raw)}}, nil
}

// settings returns the program's build settings, so that anyone can repeat the build.
func settings(info *debug.BuildInfo) *[]cyclonedx.Property {
	properties := []cyclonedx.Property{{Name: "go:version", Value: info.GoVersion}}
	for _, s := range info.Settings {
		properties = append(properties, cyclonedx.Property{Name: "go:build:" + s.Key, Value: s.Value})
	}
	return &properties
}

func write(path string, bom *cyclonedx.BOM) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(cyclonedx.NewBOMEncoder(f, cyclonedx.BOMFileFormatJSON).SetPretty(true).Encode(bom), f.Close())
}
