package toolchain

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Dockerfile is an image to build from a Dockerfile whose only base image is the build argument
// BUILDER.
//
// BUILDER names an almost empty local image, so that no registry is needed. During the build that
// image has this host's Go, C compiler and libraries mounted. The host's module and build caches
// are mounted too, so that nothing is compiled twice.
type Dockerfile struct {
	// Path is the path of the Dockerfile. The folder that holds it is the build context.
	Path string
	// Tag is the full name of the image.
	Tag string
	// Arguments are the build arguments in addition to BUILDER, by name.
	Arguments map[string]string
}

// BuilderBase is the name of that image.
const BuilderBase = "localhost/builder-base"

// BuildDockerfile builds the image unless the same inputs were built before, and returns the path
// of its docker archive. runc is the path of the runc that runs the build's steps.
func (c *Cache) BuildDockerfile(ctx context.Context, wanted Dockerfile, runc string, progress *Progress) (string, error) {
	dir := filepath.Dir(wanted.Path)
	identity, err := goIdentity(ctx, dir)
	if err != nil {
		return "", err
	}
	inputs, err := contextFiles(wanted.Path)
	if err != nil {
		return "", err
	}
	digest, err := hashRelative(dir, append(inputs, wanted.Path)...)
	if err != nil {
		return "", err
	}
	libraries, err := glibcFiles()
	if err != nil {
		return "", err
	}
	libraryIdentity, err := identify(libraries)
	if err != nil {
		return "", err
	}
	parts := []string{identity, digest, libraryIdentity, wanted.Tag}
	for _, name := range slices.Sorted(maps.Keys(wanted.Arguments)) {
		parts = append(parts, name+"="+wanted.Arguments[name])
	}
	built, err := c.Ensure(ctx, "dockerfile", Key(parts...), func(out string) error {
		start := time.Now()
		progress.Printf("building image %s from %s", wanted.Tag, wanted.Path)
		if err := c.runBuildah(ctx, wanted, runc, out, progress); err != nil {
			return err
		}
		progress.Printf("built image %s in %s", wanted.Tag, time.Since(start).Round(time.Second/10))
		return nil
	})
	return filepath.Join(built, "image.tar"), err
}

// contextFiles lists the files of the build context that the Dockerfile copies into the image.
func contextFiles(dockerfile string) ([]string, error) {
	content, err := os.ReadFile(dockerfile)
	if err != nil {
		return nil, fmt.Errorf("read the Dockerfile: %w", err)
	}
	var files []string
	for _, source := range copiedSources(string(content)) {
		matches, err := filepath.Glob(filepath.Join(filepath.Dir(dockerfile), source))
		if err != nil || len(matches) == 0 {
			return nil, fmt.Errorf("%s copies %q, which the context does not have", dockerfile, source)
		}
		for _, match := range matches {
			err := filepath.WalkDir(match, func(path string, entry fs.DirEntry, err error) error {
				if err == nil && entry.Type().IsRegular() {
					files = append(files, path)
				}
				return err
			})
			if err != nil {
				return nil, fmt.Errorf("list what %s copies: %w", dockerfile, err)
			}
		}
	}
	return files, nil
}

// copiedSources returns the sources of the COPY and ADD instructions that copy from the build
// context.
func copiedSources(dockerfile string) []string {
	var sources []string
	for _, line := range strings.Split(strings.ReplaceAll(dockerfile, "\\\n", " "), "\n") {
		fields := strings.Fields(line)
		if len(fields) < 3 || (!strings.EqualFold(fields[0], "COPY") && !strings.EqualFold(fields[0], "ADD")) {
			continue
		}
		fields = fields[1:]
		otherStage := false
		for len(fields) > 0 && strings.HasPrefix(fields[0], "--") {
			otherStage = otherStage || strings.HasPrefix(fields[0], "--from=")
			fields = fields[1:]
		}
		if !otherStage && len(fields) > 1 {
			sources = append(sources, fields[:len(fields)-1]...)
		}
	}
	return sources
}
