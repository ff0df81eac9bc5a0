package main

import (
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

const (
	cudaName = "libcuda.so.1"
	// simulatedSymbol is exported by the simulator's libcuda, and by no library of NVIDIA's.
	simulatedSymbol = "nvmlsim_standin"
)

// driverPrograms are the programs of the driver that the plugin runs or gives to containers, and
// programFolders the folders below a driver root in which they may be.
var (
	driverPrograms = []string{nvidiaSMI, "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"}
	programFolders = []string{"usr/bin", "bin", "usr/local/nvidia/bin", "usr/local/bin", "opt/bin", "usr/sbin"}
)

// checkLibraries adds to the report whether this machine's C library suffices for the driver's
// libraries and programs. In a container this is the C library of the container's image.
func (s *visit) checkLibraries() {
	const name = "the C library suffices for the driver"
	driver := s.report.Driver
	paths := driverLibraries(driver)
	driver.Simulated = exports(paths[len(paths)-1], simulatedSymbol)
	for _, program := range driverPrograms {
		for _, folder := range programFolders {
			if path := filepath.Join(driver.Root, folder, program); exists(path) && !isScript(path) {
				paths = append(paths, path)
				break
			}
		}
	}
	found, err := s.readLibraries(paths)
	s.report.Libraries = found
	if err != nil {
		s.add(name, facts.Failed, "%v", err)
		return
	}
	needed, file := "", ""
	for _, f := range found.Files {
		if compareVersions(f.GLIBC, needed) > 0 {
			needed, file = f.GLIBC, f.Name
		}
	}
	if compareVersions(needed, found.GLIBC) > 0 {
		s.add(name, facts.Differed, "%s needs glibc %s, and %s is %s", file, needed, found.CLibrary, found.GLIBC)
		return
	}
	s.add(name, facts.Agreed, "%s is glibc %s; %d files of the driver need at most %s (%s)",
		found.CLibrary, found.GLIBC, len(found.Files), orNone(needed), orNone(file))
}

// isScript reports whether a file is a script. A container may lack its interpreter, and what it
// starts.
func isScript(path string) bool {
	file, err := os.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = file.Close() }()
	start := make([]byte, 2)
	_, err = io.ReadFull(file, start)
	return err == nil && string(start) == "#!"
}

// scriptIn returns the path of a program of the driver that a script takes the place of in the CDI
// specs in text, or nothing.
func scriptIn(text string) string {
	var base specs.Spec
	if json.NewDecoder(strings.NewReader(text)).Decode(&base) != nil {
		return "" // checkSpecs reports it
	}
	for _, mount := range base.ContainerEdits.Mounts {
		if slices.Contains(driverPrograms, filepath.Base(mount.HostPath)) && isScript(mount.HostPath) {
			return mount.HostPath
		}
	}
	return ""
}

// driverLibraries returns the paths of NVML and, if the driver is installed with it, of libcuda.
func driverLibraries(d *facts.Driver) []string {
	if libcuda := filepath.Join(filepath.Dir(d.Library), cudaName); exists(libcuda) {
		return []string{d.Library, libcuda}
	}
	return []string{d.Library}
}

// readLibraries reads which C library the files at paths need, and which this machine has. The
// error names each library that this machine lacks.
func (s *visit) readLibraries(paths []string) (*facts.Libraries, error) {
	found := &facts.Libraries{}
	var failed []error
	for _, path := range paths {
		file, err := elf.Open(path)
		if err != nil {
			failed = append(failed, err)
			continue
		}
		described, err := s.describeLibrary(path, file)
		failed = append(failed, err)
		found.Files = append(found.Files, described)
		if found.CLibrary == "" {
			found.CLibrary, err = (&closure{}).find("libc.so.6", file)
			failed = append(failed, err)
		}
		_ = file.Close()
	}
	if found.CLibrary != "" {
		var err error
		found.GLIBC, err = definedGLIBC(found.CLibrary)
		failed = append(failed, err)
	}
	return found, errors.Join(failed...)
}

// describeLibrary reads what a file needs. A library of the driver may be next to NVML, every other
// one must be in this machine's library folders.
func (s *visit) describeLibrary(path string, file *elf.File) (facts.LibraryFile, error) {
	described := facts.LibraryFile{Name: filepath.Base(path)}
	var err error
	if described.Needed, err = file.ImportedLibraries(); err != nil {
		return described, fmt.Errorf("read the libraries that %s needs: %w", path, err)
	}
	var failed []error
	for _, library := range described.Needed {
		if exists(filepath.Join(filepath.Dir(s.report.Driver.Library), library)) {
			continue
		}
		if _, err := (&closure{}).find(library, file); err != nil {
			failed = append(failed, fmt.Errorf("%s needs a library: %w", path, err))
		}
	}
	needs, err := file.DynamicVersionNeeds()
	if err != nil && len(described.Needed) > 0 {
		failed = append(failed, fmt.Errorf("read the versions that %s needs: %w", path, err))
	}
	for _, need := range needs {
		for _, version := range need.Needs {
			described.GLIBC = laterGLIBC(described.GLIBC, version.Dep)
		}
	}
	return described, errors.Join(failed...)
}

// definedGLIBC returns the highest version of glibc's symbols that a C library defines.
func definedGLIBC(path string) (string, error) {
	file, err := elf.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = file.Close() }()
	versions, err := file.DynamicVersions()
	if err != nil {
		return "", fmt.Errorf("read the versions of %s: %w", path, err)
	}
	highest := ""
	for _, version := range versions {
		highest = laterGLIBC(highest, version.Name)
	}
	if highest == "" {
		return "", fmt.Errorf("%s is not glibc", path)
	}
	return highest, nil
}

// laterGLIBC returns the later of a version and the one that a symbol version such as GLIBC_2.34
// names. It ignores symbol versions of other libraries and GLIBC_PRIVATE.
func laterGLIBC(version, symbol string) string {
	named, ok := strings.CutPrefix(symbol, "GLIBC_2")
	if !ok || compareVersions("2"+named, version) <= 0 {
		return version
	}
	return "2" + named
}

// compareVersions compares two versions such as 2.34 number by number. An empty version is the
// lowest.
func compareVersions(a, b string) int {
	return slices.Compare(numbers(a), numbers(b))
}

func numbers(version string) []int {
	var all []int
	for part := range strings.SplitSeq(version, ".") {
		if n, err := strconv.Atoi(part); err == nil {
			all = append(all, n)
		}
	}
	return all
}

// exports reports whether the library at path exports a symbol.
func exports(path, symbol string) bool {
	file, err := elf.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = file.Close() }()
	symbols, err := file.DynamicSymbols()
	return err == nil && slices.ContainsFunc(symbols, func(s elf.Symbol) bool { return s.Name == symbol && s.Section != elf.SHN_UNDEF })
}
