package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/CycloneDX/cyclonedx-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// sbom returns the list of what is in the image of one architecture: each program with its modules,
// the C library's package, and each file with its hash. hack/sbom made the programs' lists.
func (b *build) sbom(arch string, image ocispec.Descriptor) (*cyclonedx.BOM, error) {
	libraries, own, err := b.imageFiles(arch)
	if err != nil {
		return nil, err
	}
	purl := fmt.Sprintf("pkg:oci/gpu-dra-driver@%s?arch=%s&repository_url=%s",
		url.QueryEscape(image.Digest.String()), arch, url.QueryEscape(b.imageRepository()))
	whole := cyclonedx.Component{
		BOMRef: purl, Type: cyclonedx.ComponentTypeContainer, Name: b.imageRepository(), Version: b.version, PackageURL: purl,
	}
	libc, err := b.libcComponent(arch, libraries)
	if err != nil {
		return nil, err
	}
	var parts contents
	parts.add(libc)
	for _, name := range slices.Sorted(maps.Keys(own)) {
		list := ""
		if slices.Contains(programs, filepath.Base(name)) {
			list = filepath.Join(b.programs, arch, "sbom", filepath.Base(name)+".cdx.json")
		}
		if err := parts.addFile(name, own[name], list); err != nil {
			return nil, err
		}
	}
	return parts.bom(whole), nil
}

// contents are the components of an image or an archive. refs are those that have files.
type contents struct {
	components   []cyclonedx.Component
	refs         []string
	dependencies []cyclonedx.Dependency
}

func (c *contents) add(component cyclonedx.Component) {
	c.components, c.refs = append(c.components, component), append(c.refs, component.BOMRef)
}

// addFile adds a file with its hash. list is the list of its modules, if it is a program.
func (c *contents) addFile(name string, file imageFile, list string) error {
	files, err := fileComponents(map[string]imageFile{name: file})
	if err != nil {
		return err
	}
	if list == "" {
		c.components = append(c.components, files...)
		return nil
	}
	program, modules, err := readSBOM(list)
	if err != nil {
		return err
	}
	program.BOMRef, program.Components = name, &files
	var uses []string
	for _, module := range modules {
		uses = append(uses, module.BOMRef)
		if !slices.ContainsFunc(c.components, func(known cyclonedx.Component) bool { return known.BOMRef == module.BOMRef }) {
			c.components = append(c.components, module)
		}
	}
	c.add(program)
	c.dependencies = append(c.dependencies, cyclonedx.Dependency{Ref: name, Dependencies: &uses})
	return nil
}

// bom returns the list of whole, which consists of the components.
func (c *contents) bom(whole cyclonedx.Component) *cyclonedx.BOM {
	bom := cyclonedx.NewBOM()
	bom.Metadata, bom.Components = &cyclonedx.Metadata{Component: &whole}, &c.components
	dependencies := append(c.dependencies, cyclonedx.Dependency{Ref: whole.BOMRef, Dependencies: &c.refs})
	bom.Dependencies = &dependencies
	return bom
}

// libcComponent describes the package of the C library, with its files in the image.
func (b *build) libcComponent(arch string, libraries map[string]imageFile) (cyclonedx.Component, error) {
	var c cyclonedx.Component
	distribution, err := readDistribution()
	if err != nil {
		return c, err
	}
	packages, err := debianPackages(filepath.Join(b.cLibraries, arch))
	if err != nil {
		return c, err
	}
	i := slices.IndexFunc(packages, func(p debianPackage) bool { return p.Name == "libc6" })
	if i < 0 {
		return c, fmt.Errorf("no package libc6 in %s", filepath.Join(b.cLibraries, arch))
	}
	files, err := fileComponents(libraries)
	purl := packages[i].purl(distribution)
	licences := cyclonedx.Licenses{{License: &cyclonedx.License{ID: "LGPL-2.1-or-later"}}}
	return cyclonedx.Component{
		BOMRef: purl, Type: cyclonedx.ComponentTypeLibrary, Name: "libc6", Version: packages[i].Version, PackageURL: purl,
		Licenses: &licences, Components: &files,
	}, err
}

func fileComponents(files map[string]imageFile) ([]cyclonedx.Component, error) {
	var components []cyclonedx.Component
	for _, name := range slices.Sorted(maps.Keys(files)) {
		raw, err := os.ReadFile(files[name].source)
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(raw)
		hashes := []cyclonedx.Hash{{Algorithm: cyclonedx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}}
		components = append(components, cyclonedx.Component{
			BOMRef: "file:" + name, Type: cyclonedx.ComponentTypeFile, Name: name, Hashes: &hashes,
		})
	}
	return components, nil
}

// readSBOM reads the list of one program.
func readSBOM(path string) (program cyclonedx.Component, modules []cyclonedx.Component, err error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return program, nil, fmt.Errorf("read the list that hack/sbom makes: %w", err)
	}
	var bom cyclonedx.BOM
	if err := cyclonedx.NewBOMDecoder(bytes.NewReader(raw), cyclonedx.BOMFileFormatJSON).Decode(&bom); err != nil {
		return program, nil, fmt.Errorf("read %s: %w", path, err)
	}
	if bom.Metadata == nil || bom.Metadata.Component == nil || bom.Components == nil {
		return program, nil, fmt.Errorf("%s describes no program: make it with hack/sbom", path)
	}
	return *bom.Metadata.Component, *bom.Components, nil
}

// hashesOfFiles returns the SHA-256 of each file in the list, by its path in the image.
func hashesOfFiles(bom *cyclonedx.BOM) map[string]string {
	hashes := map[string]string{}
	var visit func(*[]cyclonedx.Component)
	visit = func(components *[]cyclonedx.Component) {
		if components == nil {
			return
		}
		for _, c := range *components {
			if c.Type == cyclonedx.ComponentTypeFile && c.Hashes != nil && len(*c.Hashes) == 1 {
				hashes[c.Name] = (*c.Hashes)[0].Value
			}
			visit(c.Components)
		}
	}
	visit(bom.Components)
	return hashes
}

// distribution is the Linux distribution that the C library comes from, like debian 12.
type distribution struct{ id, version string }

func readDistribution() (distribution, error) {
	var d distribution
	raw, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return d, fmt.Errorf("find out the distribution: %w", err)
	}
	for line := range strings.Lines(string(raw)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch key {
		case "ID":
			d.id = strings.Trim(value, `"`)
		case "VERSION_ID":
			d.version = strings.Trim(value, `"`)
		}
	}
	return d, nil
}

// purl returns the package's URL (https://github.com/package-url/purl-spec).
func (p debianPackage) purl(d distribution) string {
	return fmt.Sprintf("pkg:deb/%s/%s@%s?arch=%s&distro=%s-%s", d.id, p.Name, url.QueryEscape(p.Version), p.Arch, d.id, d.version)
}
