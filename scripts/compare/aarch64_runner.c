/* Runs kernels of AArch64 for a process of another processor: see aarch64_kernels.py.

   runner FILE SIZE: memory that both share.  A line of standard input is one launch: the path of a
   library, how many tasks, how many arguments, and each as p and a place in the memory, or n and a
   number.  The answer is a line. */
#include <dlfcn.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

typedef void kernel(int64_t *, int64_t, int64_t);

int main(int count, char **texts) {
  char path[4096], kind;
  int64_t tasks, words, word, size = count == 3 ? atoll(texts[2]) : 0;
  int file = count == 3 ? open(texts[1], O_RDWR) : -1;
  char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return 2;
  while (scanf("%4095s %" SCNd64 " %" SCNd64, path, &tasks, &words) == 3) {
    int64_t *arguments = malloc((words + 1) * sizeof *arguments);
    for (int64_t k = 0; k < words; k++) {
      if (scanf(" %c%" SCNd64, &kind, &word) != 2) return 3;
      arguments[k] = kind == 'p' ? (int64_t)(memory + word) : word;
    }
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    kernel *entry = library ? (kernel *)dlsym(library, "kernel.entry") : NULL;
    if (!entry) {
      printf("%s\n", dlerror());
    } else {
      for (int64_t task = 0; task < tasks; task++) entry(arguments, task, tasks);
      puts("done");
    }
    if (library) dlclose(library);
    free(arguments);
    fflush(stdout);
  }
  return 0;
}
