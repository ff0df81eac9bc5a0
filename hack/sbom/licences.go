package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/CycloneDX/cyclonedx-go"
	"github.com/google/licensecheck"
	"golang.org/x/mod/module"
)

// permissive are the SPDX names of the permitted licences.
var permissive = []string{"Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "ISC", "0BSD", "MPL-2.0", "CC0-1.0", "Unlicense", "Zlib"}

// enough is the percentage of a licence file's text that must match a known licence. It is below
// 100 because copyright lines match none.
const enough = 75

var licenceFile = regexp.MustCompile(`(?i)^(un)?licen[cs]e([-.].*)?$|^copying([-.].*)?$`)

// licences returns the SPDX names of the licences in a module's licence files, or an error if a
// licence is unknown or not permitted. cache is Go's module cache.
func licences(cache, path, version string) ([]string, error) {
	escapedPath, err := module.EscapePath(path)
	if err != nil {
		return nil, err
	}
	escapedVersion, err := module.EscapeVersion(version)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(cache, filepath.FromSlash(escapedPath)+"@"+escapedVersion)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("find its licence (go mod download): %w", err)
	}
	var ids []string
	for _, e := range entries {
		if !e.Type().IsRegular() || !licenceFile.MatchString(e.Name()) {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		found := licensecheck.Scan(text)
		if found.Percent < enough {
			continue
		}
		for _, m := range found.Match {
			if !m.IsURL && !slices.Contains(ids, m.ID) {
				ids = append(ids, m.ID)
			}
		}
	}
	slices.Sort(ids)
	if len(ids) == 0 {
		return nil, fmt.Errorf("none of its files is a known licence: check the module")
	}
	for _, id := range ids {
		if !slices.Contains(permissive, id) {
			return nil, fmt.Errorf("its licence %s is not permitted (permitted: %s)", id, strings.Join(permissive, ", "))
		}
	}
	return ids, nil
}

func choices(ids []string) *cyclonedx.Licenses {
	var all cyclonedx.Licenses
	for _, id := range ids {
		all = append(all, cyclonedx.LicenseChoice{License: &cyclonedx.License{ID: id}})
	}
	return &all
}

// licencesOf returns the licences of all components in the list, each licence once.
func licencesOf(bom *cyclonedx.BOM) []string {
	var ids []string
	for _, c := range *bom.Components {
		for _, l := range *c.Licenses {
			if !slices.Contains(ids, l.License.ID) {
				ids = append(ids, l.License.ID)
			}
		}
	}
	slices.Sort(ids)
	return ids
}
