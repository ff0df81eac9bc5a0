package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/CycloneDX/cyclonedx-go"
)

const mit = `Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation files (the "Software"), to deal in the Software
without restriction, including without limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to
whom the Software is furnished to do so, subject to the following conditions: The above copyright notice and this permission notice shall be included in all copies or substantial portions
of the Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR
PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE,
ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.`

// The test lists the modules of its own binary, which are those of this tool.
func TestSBOMIsCompleteAndReproducible(t *testing.T) {
	cache, err := moduleCache()
	if err != nil {
		t.Fatal(err)
	}
	var first []byte
	for range 2 {
		bom, err := list(os.Args[0], cache)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "list.json")
		if err := write(path, bom); err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if first != nil && !bytes.Equal(first, raw) {
			t.Error("the same program has two lists")
		}
		first = raw
		var read cyclonedx.BOM
		if err := cyclonedx.NewBOMDecoder(bytes.NewReader(raw), cyclonedx.BOMFileFormatJSON).Decode(&read); err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, c := range *read.Components {
			names = append(names, c.Name)
			if c.Name != "std" && (c.Hashes == nil || !strings.HasPrefix(c.PackageURL, "pkg:golang/"+c.Name+"@v")) || c.Licenses == nil {
				t.Errorf("%+v", c)
			}
		}
		for _, want := range []string{"std", "github.com/CycloneDX/cyclonedx-go", "github.com/google/licensecheck", "golang.org/x/mod"} {
			if !slices.Contains(names, want) {
				t.Errorf("%s is not among %q", want, names)
			}
		}
	}
}

func TestRefusesModuleWithoutAllowedLicence(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		says  string // part of the error; empty means permitted
	}{
		"MIT":          {map[string]string{"LICENSE": mit}, ""},
		"another name": {map[string]string{"COPYING.md": "Copyright (c) The Authors\n\n" + mit}, ""},
		"none":         {map[string]string{"README": mit}, "none of its files"},
		"unknown": {map[string]string{"LICENSE": "All of this is mine, and you may look at it on Sundays, as long as " +
			"you say please before and thank you afterwards."}, "none of its files"},
		"missing": {nil, "go mod download"},
	} {
		t.Run(name, func(t *testing.T) {
			cache := t.TempDir()
			dir := filepath.Join(cache, "example.com", "!some", "module@v1.0.0")
			for file, content := range c.files {
				if err := os.MkdirAll(dir, 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			ids, err := licences(cache, "example.com/Some/module", "v1.0.0")
			if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("%q, %v", ids, err)
			}
		})
	}
	saved := permissive
	permissive = []string{"Apache-2.0"}
	defer func() { permissive = saved }()
	cache := t.TempDir()
	dir := filepath.Join(cache, "example.com", "module@v1.0.0")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "LICENSE"), []byte(mit), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := licences(cache, "example.com/module", "v1.0.0")
	if err == nil || !strings.Contains(err.Error(), "licence MIT is not permitted") {
		t.Error(err)
	}
}

func TestRefusesMalformedGoSumHash(t *testing.T) {
	for _, sum := range []string{"", "h1:", "h1:AAAA", "h2:688QHn2X/5nRezKe2ueIVCt+NRqf7fl3AVQk+vaFcIo=",
		"688QHn2X/5nRezKe2ueIVCt+NRqf7fl3AVQk+vaFcIo="} {
		if h, err := hashes(sum); err == nil {
			t.Errorf("%q: %v", sum, h)
		}
	}
	h, err := hashes("h1:688QHn2X/5nRezKe2ueIVCt+NRqf7fl3AVQk+vaFcIo=")
	if err != nil || len((*h)[0].Value) != 64 {
		t.Error(h, err)
	}
}
